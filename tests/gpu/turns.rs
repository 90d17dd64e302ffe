//! Which tests may use the GPU at the same time.
//!
//! Kernels that wait for each other must all be resident, so those tests have the GPU alone. The others share it, but not
//! with those: each time one frees memory the driver waits for all that runs.

use std::cell::Cell;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

static GPU: RwLock<()> = RwLock::new(());

thread_local! {
    static WAITED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    static NAME: Cell<&'static str> = const { Cell::new("") };
}

/// This thread's test, for who reads the trace.
pub(crate) fn is(name: &'static str) {
    NAME.set(name);
}

/// Until the guard is dropped no other test uses the GPU.
pub(crate) fn alone() -> RwLockWriteGuard<'static, ()> {
    let start = Instant::now();
    let guard = GPU.write().unwrap_or_else(PoisonError::into_inner);
    WAITED.set(start.elapsed());
    if std::env::var_os("RINGSEAL_TEST_TRACE").is_some() {
        println!("{} has the GPU", NAME.get());
    }
    guard
}

/// Until the guard is dropped no test has the GPU alone.
pub(crate) fn beside_others() -> RwLockReadGuard<'static, ()> {
    let start = Instant::now();
    let guard = GPU.read().unwrap_or_else(PoisonError::into_inner);
    WAITED.set(start.elapsed());
    guard
}

/// How long this thread's test has waited for its turn.
pub(crate) fn waited() -> Duration {
    WAITED.take()
}

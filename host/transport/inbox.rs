//! Where a rank's records wait until it asks for them.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::{Abort, Delivery, Received};

/// A record, with the session that it claims to belong to.
pub(super) type Arrival = (u64, Received);

pub(super) struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// By sender.
    queues: Vec<VecDeque<Arrival>>,
    /// By sender: nothing more will come.
    lost: Vec<bool>,
    /// The sender that the owner is waiting for, so that others needn't wake it.
    awaited: Option<usize>,
    aborted: Option<(u64, Abort)>,
}

impl Inbox {
    pub(super) fn new(ranks: usize) -> Self {
        let queues = (0..ranks).map(|_| VecDeque::new()).collect();
        let lost = vec![false; ranks];
        Self {
            state: Mutex::new(State { queues, lost, awaited: None, aborted: None }),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn put(&self, from: usize, arrival: Arrival) {
        let mut state = self.lock();
        state.queues[from].push_back(arrival);
        let awaited = state.awaited == Some(from);
        drop(state);
        if awaited {
            self.changed.notify_one();
        }
    }

    /// Nothing more will come from this rank.
    pub(super) fn lose(&self, from: usize) {
        self.lock().lost[from] = true;
        self.changed.notify_one();
    }

    /// Ends waits in this session, unless another rank has before.
    pub(super) fn abort(&self, session: u64, abort: Abort) {
        let mut state = self.lock();
        if state.aborted.is_none_or(|(aborted, _)| aborted != session) {
            state.aborted = Some((session, abort));
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Waits for the session's next record of a rank.
    pub(super) fn receive(&self, from: usize, session: u64, deadline: Instant) -> Delivery {
        let mut state = self.lock();
        let delivery = loop {
            if let Some(received) = state.next(from, session) {
                break Delivery::Record(received);
            }
            match state.aborted {
                Some((aborted, abort)) if aborted == session => break Delivery::Aborted(abort),
                _ => {}
            }
            if state.lost[from] {
                break Delivery::Lost;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break Delivery::TimedOut;
            }
            state.awaited = Some(from);
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        state.awaited = None;
        delivery
    }
}

impl State {
    /// Drops what belongs to other sessions.
    fn next(&mut self, from: usize, session: u64) -> Option<Received> {
        while let Some((claimed, received)) = self.queues[from].pop_front() {
            if claimed == session {
                return Some(received);
            }
        }
        None
    }
}

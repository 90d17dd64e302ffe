//! The emulator catches what a GPU would get silently wrong.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ringseal_kernels::device::emulated::{Launch, Order, Scope, collective, launch, load_async};
use ringseal_kernels::device::{self, bits, global, shared, sync_threads, sync_warpgroup, thread, warp};
use ringseal_kernels::params::SHARED_BASE;

/// The message of the panic that the kernel ends in.
fn failure(threads: u32, shared_bytes: u32, kernel: impl Fn()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(|| launch(&[Launch::new(1, threads, shared_bytes, kernel)])))
        .expect_err("the kernel must fail");
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|&s| s.to_owned()))
        .expect("a message")
}

fn word(i: u32) -> u32 {
    SHARED_BASE + 4 * i
}

/// Each thread passes its number to its neighbour through shared memory; `order` runs between store and load.
fn pass_on(neighbour: impl Fn(u32) -> u32, order: impl Fn()) {
    let i = thread::index();
    // SAFETY: in the window; ordered by `order`, or the emulator says so.
    unsafe {
        shared::store_u32::<0>(word(i), i);
        order();
        assert_eq!(shared::load_u32::<0>(word(neighbour(i))), neighbour(i));
    }
}

#[test]
fn barrier_orders_the_block() {
    launch(&[Launch::new(3, 256, 1024, || pass_on(|i| (i + 100) % 256, sync_threads))]);
}

#[test]
fn missing_barrier_is_a_race() {
    let message = failure(256, 1024, || {
        let i = thread::index();
        // SAFETY: the emulator catches the race.
        unsafe {
            shared::store_u32::<0>(word(i), i);
            sync_threads();
            shared::load_u32::<0>(word(255 - i));
            shared::store_u32::<0>(word(i), i);
        }
    });
    assert!(message.starts_with("race"), "{message}");
    assert!(message.matches("emulator.rs").count() == 2, "both places: {message}");
}

#[test]
fn two_stores_without_a_barrier_are_a_race() {
    // SAFETY: the emulator catches the race.
    let message = failure(2, 16, || unsafe { shared::store_u32::<0>(word(0), thread::index()) });
    assert!(message.starts_with("race"), "{message}");
}

#[test]
fn store_then_load_without_a_barrier_is_a_race() {
    let message = failure(64, 256, || pass_on(|i| i.saturating_sub(1), || ()));
    assert!(message.starts_with("race"), "{message}");
}

#[test]
fn warp_barrier_orders_a_warp_only() {
    launch(&[Launch::new(1, 128, 512, || pass_on(|i| i ^ 5, warp::sync))]);
    let message = failure(128, 512, || pass_on(|i| i ^ 32, warp::sync));
    assert!(message.starts_with("race") || message.starts_with("poison"), "{message}");
}

#[test]
fn warpgroup_barrier_orders_a_warpgroup_only() {
    launch(&[Launch::new(1, 256, 1024, || pass_on(|i| i ^ 96, sync_warpgroup))]);
    let message = failure(256, 1024, || pass_on(|i| i ^ 128, sync_warpgroup));
    assert!(message.starts_with("race") || message.starts_with("poison"), "{message}");
}

/// All threads add their bit to the first word; `before` and `after` run around it.
fn add_up(before: impl Fn(), after: impl Fn()) {
    let i = thread::index();
    // SAFETY: in the window; ordered by what runs around, or the emulator says so.
    unsafe {
        if i == 0 {
            shared::store_u32::<0>(word(0), 0);
        }
        before();
        shared::xor_u32(word(0), 1 << (i % 32));
        after();
        if i == 77 {
            // Three of each bit.
            assert_eq!(shared::load_u32::<0>(word(0)), u32::MAX);
            shared::store_u32::<0>(word(0), 0);
        }
    }
}

#[test]
fn additions_need_no_order_among_each_other() {
    launch(&[Launch::new(1, 96, 16, || add_up(sync_threads, sync_threads))]);
    let message = failure(96, 16, || add_up(sync_threads, || ()));
    assert!(message.starts_with("race") && message.contains("adds"), "{message}");
    let message = failure(96, 16, || add_up(sync_threads, warp::sync));
    assert!(message.starts_with("race") && message.contains("adds"), "{message}");
    let message = failure(96, 16, || add_up(|| (), sync_threads));
    assert!(message.starts_with("race") || message.starts_with("poison"), "{message}");
}

#[test]
fn shuffles_do_not_order_memory() {
    let message = failure(32, 128, || {
        pass_on(
            |i| i ^ 1,
            || {
                warp::shuffle_xor(0, 1);
            },
        )
    });
    assert!(message.starts_with("race"), "{message}");
}

#[test]
fn unwritten_shared_memory_is_poison() {
    // SAFETY: the emulator catches the load.
    let message = failure(1, 1024, || unsafe {
        shared::load_u32::<4>(word(0));
    });
    assert!(message.starts_with("poison"), "{message}");
}

#[test]
fn an_earlier_launch_leaves_poison() {
    // SAFETY: one thread.
    launch(&[Launch::new(1, 1, 16, || unsafe { shared::store_u32::<0>(word(0), 1) })]);
    // SAFETY: the emulator catches the load.
    let message = failure(1, 16, || unsafe {
        shared::load_u32::<0>(word(0));
    });
    assert!(message.starts_with("poison"), "{message}");
}

#[test]
fn outside_the_window_or_misaligned() {
    for address in [SHARED_BASE - 4, SHARED_BASE + 16, SHARED_BASE + 2] {
        // SAFETY: the emulator catches the store.
        let message = failure(1, 16, || unsafe { shared::store_u32::<0>(address, 0) });
        assert!(message.starts_with("shared memory"), "{message}");
    }
    let data = [0u32; 8];
    // SAFETY: the emulator catches the load.
    let message = failure(1, 0, || unsafe {
        global::load_16(data.as_ptr() as u64 / 16 * 16 + 4);
    });
    assert!(message.starts_with("global memory"), "{message}");
}

#[test]
fn divergent_barriers_are_caught() {
    let message = failure(64, 0, || {
        if thread::index() < 32 {
            sync_threads();
        }
        sync_threads();
    });
    assert!(message.starts_with("divergence"), "{message}");
    let message = failure(64, 0, || {
        if thread::index() != 7 {
            sync_threads()
        }
    });
    assert!(message.starts_with("deadlock"), "{message}");
}

#[test]
fn warp_operations() {
    launch(&[Launch::new(1, 96, 0, || {
        let (i, lane) = (thread::index(), thread::lane());
        assert_eq!((thread::warp(), lane), (i / 32, i % 32));
        assert_eq!(warp::shuffle_xor(i, 3), i ^ 3);
        assert_eq!(warp::shuffle(i, 40), i / 32 * 32 + 8);
        assert_eq!(warp::ballot(lane % 2 == 1), 0xaaaa_aaaa);
    })]);
}

#[test]
fn collective_acts_once_in_thread_order() {
    launch(&[Launch::new(1, 256, 0, || {
        let sum = collective(Scope::Warpgroup, Order::Nothing, u64::from(thread::index()), |values| {
            assert!(values.is_sorted() && values.len() == 128);
            let sum = values.iter().sum();
            values.fill(sum);
        });
        let first = u64::from(thread::index() / 128 * 128);
        assert_eq!(sum, 128 * first + 127 * 64);
    })]);
}

#[test]
fn the_asynchronous_proxy_needs_a_fence() {
    let kernel = |fence: bool| {
        move || {
            // SAFETY: a word a thread; a barrier before the loads.
            unsafe { shared::store_u32::<0>(word(thread::index()), thread::index()) };
            if fence || thread::index() != 77 {
                device::fence::proxy_async_shared();
            }
            sync_threads();
            let sum = collective(Scope::Warpgroup, Order::Nothing, 0, |sums| {
                sums.fill((0..128).map(|i| load_async::<1>(word(i))[0]).sum());
            });
            assert_eq!(sum, 127 * 64);
        }
    };
    launch(&[Launch::new(1, 128, 512, kernel(true))]);
    let message = failure(128, 512, kernel(false));
    assert!(message.starts_with("no fence") && message.contains("thread 77"), "{message}");
}

#[test]
fn blocks_and_grids_that_wait_for_each_other() {
    let mut flags = [0u64; 4];
    let base = flags.as_mut_ptr() as u64;
    // A token goes round the four blocks of two grids, ten times.
    let kernel = |grid: u64| {
        move || {
            let me = 2 * grid + u64::from(thread::block_index());
            for round in 0..10 {
                let ticket = 4 * round + me;
                // SAFETY: words of `flags`.
                unsafe {
                    if thread::index() == 0 {
                        while global::load_acquire_sys(base + 8 * me) < ticket {
                            device::spin_pause();
                        }
                        global::store_release_sys(base + 8 * ((me + 1) % 4), ticket + 1);
                    }
                }
                sync_threads();
            }
        }
    };
    launch(&[Launch::new(2, 33, 0, kernel(0)), Launch::new(2, 33, 0, kernel(1))]);
    assert_eq!(flags, [40, 37, 38, 39]);
}

#[test]
fn time_passes_while_spinning_and_is_repeatable() {
    let run = || {
        let mut times = [0u64; 2];
        let base = times.as_mut_ptr() as u64;
        launch(&[Launch::new(2, 1, 0, move || {
            let start = device::nanotime();
            while device::nanotime() < start + 50_000 {
                device::spin_pause();
            }
            // SAFETY: a word of `times` a block.
            unsafe { global::store_u64(base + 8 * u64::from(thread::block_index()), device::nanotime()) };
        })]);
        times
    };
    assert_eq!(run(), run());
}

#[test]
fn bit_instructions() {
    assert_eq!(bits::permute_bytes::<0x4140>(0x4433_2211, 0x8877_6655), 0x5522_5511);
    assert_eq!(bits::funnel_shift_right(0x0000_0010, 0x0000_000f, 4), 0xf000_0001);
    assert_eq!(bits::funnel_shift_right(0x1234_5678, 0xffff_ffff, 32), 0x1234_5678);
    // PTX ISA, lop3: the table of a function is the function of these three constants.
    let (a, b, c) = (0xf0u32, 0xcc, 0xaa);
    assert_eq!(bits::lop3::<0x96>(a, b, c) & 0xff, a ^ b ^ c);
    assert_eq!(bits::lop3::<0xca>(a, b, c) & 0xff, (a & b) | (!a & c & 0xff));
}

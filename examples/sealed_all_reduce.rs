//! Four ranks sum their gradients; then somebody on the link flips one bit.
//!
//!     cargo run --release --example sealed_all_reduce

#![expect(clippy::print_stdout, reason = "an example shows its results")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use ringseal::ReduceOp;
use ringseal::channel::GroupSecret;
use ringseal::collective::{Communicator, Options};
use ringseal::transport::Transport;
use ringseal::transport::memory::{Link, Packet, Tap, tapped_network};

const RANKS: usize = 4;

/// Sees every packet on every link, and flips a bit of the next one when told to.
#[derive(Default)]
struct Attacker {
    armed: AtomicBool,
}

impl Tap for Attacker {
    fn pass(&self, link: Link, mut packet: Packet, deliver: &mut dyn FnMut(Link, Packet)) {
        if self.armed.swap(false, Ordering::Relaxed) {
            packet.bytes[0] ^= 1;
        }
        deliver(link, packet);
    }
}

fn main() -> ringseal::Result<()> {
    // In earnest the secret comes from attestation, and each rank joins from a process of its own.
    let secret = GroupSecret::random()?;
    let attacker = Arc::new(Attacker::default());
    let links = tapped_network(RANKS, attacker.clone());
    let links = links.into_iter().map(|link| Box::new(link) as Box<dyn Transport>).collect();
    let mut ranks = Communicator::in_process_over(links, &secret, &Options::default())?;

    println!("an honest link:");
    all_reduce(&mut ranks);
    attacker.armed.store(true, Ordering::Relaxed);
    println!("one flipped bit:");
    all_reduce(&mut ranks);
    Ok(())
}

/// Every rank on a thread of its own, with a gradient of its own.
fn all_reduce(ranks: &mut [Communicator]) {
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter_mut().map(|rank| scope.spawn(|| reduce_one(rank))).collect();
        for thread in threads {
            println!("  {}", thread.join().unwrap_or_else(|_| "panicked".into()));
        }
    });
}

fn reduce_one(rank: &mut Communicator) -> String {
    let mut gradient = vec![1.0_f32 + rank.rank() as f32; 100_000];
    let outcome = rank.all_reduce_in_place(&mut gradient, ReduceOp::Sum);
    let outcome = outcome.map_or_else(|error| error.to_string(), |()| "done".into());
    format!("rank {} returns [{:?}, ..]: {outcome}", rank.rank(), gradient[0])
}

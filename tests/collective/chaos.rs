//! An adversary who does anything at random, to many packets of one collective: whatever comes of it, a rank either has
//! the right result or an error and zeros.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use ringseal::collective::{Algorithm, Buffers, Options, Request};
use ringseal::transport::memory::{Link, Packet, Tap};
use ringseal::{Dtype, Error, ReduceOp};

use crate::group::{Numbers, PATIENT, inputs, on_all, on_each, options, tapped_group};
use crate::model::reduced;

struct Adversary {
    ranks: usize,
    state: Mutex<State>,
}

struct State {
    numbers: Numbers,
    /// How many of 64 packets it meddles with.
    zeal: u64,
    kept: Vec<Packet>,
}

impl Tap for Adversary {
    fn pass(&self, link: Link, packet: Packet, deliver: &mut dyn FnMut(Link, Packet)) {
        let mut state = self.state.lock().unwrap();
        state.kept.push(packet.clone());
        let draw = state.numbers.draw();
        if draw % 64 >= state.zeal {
            return deliver(link, packet);
        }
        let (what, which, bit) = (draw >> 8 & 7, draw >> 16 & 0xffff, draw >> 32);
        let kept = state.kept[which as usize % state.kept.len()].clone();
        // All sessions look alike to it, so it can claim that anything belongs to this one.
        let kept = Packet { session: packet.session, ..kept };
        let mut changed = packet.clone();
        match what {
            0 => {}
            1 => deliver(link, kept),
            2 => {
                deliver(link, packet.clone());
                deliver(link, packet);
            }
            3 => {
                deliver(link, kept);
                deliver(link, packet);
            }
            4 => deliver(Link { to: which as usize % self.ranks, ..link }, packet),
            5 => deliver(Link { from: which as usize % self.ranks, ..link }, packet),
            6 => {
                let bits = 8 * (changed.bytes.len() + 16) as u64;
                let bit = (bit % bits) as usize;
                match changed.bytes.get_mut(bit / 8) {
                    Some(byte) => *byte ^= 1 << (bit % 8),
                    None => changed.tag[bit / 8 - packet.bytes.len()] ^= 1 << (bit % 8),
                }
                deliver(link, changed);
            }
            _ => {
                changed.bytes.resize(bit as usize % 80, 0);
                deliver(link, changed);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn nobody_is_deceived(
        ranks in 2..6_usize,
        count in 0..200_usize,
        algorithm in prop::sample::select(Algorithm::ALL.to_vec()),
        zeal in 1..8_u64,
        seed in any::<u64>(),
    ) {
        let state = State { numbers: Numbers(seed), zeal: 0, kept: Vec::new() };
        let adversary = Arc::new(Adversary { ranks, state: Mutex::new(state) });
        let mut group = tapped_group(ranks, &Options { algorithm, ..options() }, adversary.clone());
        let inputs = inputs(Dtype::F32, count, ranks, seed);
        let wanted = reduced(algorithm, false, Dtype::F32, ReduceOp::Sum, &inputs);
        let request = Request::AllReduce(ReduceOp::Sum);
        for zeal in [0, zeal, 0, zeal, 0] {
            adversary.state.lock().unwrap().zeal = zeal;
            group.iter_mut().for_each(|rank| rank.set_timeout(if zeal == 0 { PATIENT } else { Duration::from_millis(30) }));
            let mut vectors = inputs.clone();
            let results = on_each(&mut group, &mut vectors, |rank, vector| {
                rank.run(request, Dtype::F32, Buffers::InPlace(vector))
            });
            for (result, vector) in results.into_iter().zip(vectors) {
                match result {
                    Ok(()) => prop_assert_eq!(&vector, &wanted),
                    Err(Error::Record { .. } | Error::Deadline { .. }) if zeal > 0 => {
                        prop_assert!(vector.iter().all(|byte| *byte == 0));
                    }
                    Err(error) => prop_assert!(false, "{error}"),
                }
            }
            group.iter_mut().for_each(|rank| rank.set_timeout(PATIENT));
            on_all(&mut group, |rank| rank.rekey().unwrap());
        }
    }
}

//! What crosses the links: no plaintext, and no keystream twice.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use ringseal::collective::{Algorithm, Crypto, KeyLength, Options};
use ringseal::transport::memory::{Link, Packet, Tap};
use ringseal::{Error, ReduceOp};

use crate::group::{on_all, options, tapped_group};

/// Keeps everything; can be told to spoil one packet.
#[derive(Default)]
struct Listener {
    packets: Mutex<Vec<Packet>>,
    spoil: Mutex<Option<usize>>,
}

impl Tap for Listener {
    fn pass(&self, link: Link, mut packet: Packet, deliver: &mut dyn FnMut(Link, Packet)) {
        let mut packets = self.packets.lock().unwrap();
        packets.push(packet.clone());
        let mut spoil = self.spoil.lock().unwrap();
        if *spoil == Some(0) {
            packet.tag[0] ^= 1;
        }
        *spoil = spoil.and_then(|left| left.checked_sub(1));
        drop((packets, spoil));
        deliver(link, packet);
    }
}

const PATTERN: [u8; 8] = *b"GRADIENT";

/// Runs every collective on vectors that hold, and reduce to, the pattern; says whether any byte string that crossed
/// contains four bytes of it.
fn pattern_shows(crypto: Crypto, algorithm: Algorithm) -> bool {
    let listener = Arc::new(Listener::default());
    let mut group = tapped_group(4, &Options { crypto, algorithm, ..options() }, listener.clone());
    on_all(&mut group, |rank| {
        let mut vector: Vec<u8> = PATTERN.iter().copied().cycle().take(2000).collect();
        let wanted = vector.clone();
        rank.all_reduce_in_place(&mut vector, ReduceOp::Max).unwrap();
        rank.reduce_scatter_in_place(&mut vector, ReduceOp::Min).unwrap();
        rank.all_gather_in_place(&mut vector).unwrap();
        rank.broadcast_in_place(&mut vector, 1).unwrap();
        assert_eq!(vector, wanted);
    });
    let packets = listener.packets.lock().unwrap();
    assert!(packets.iter().map(|packet| packet.bytes.len()).sum::<usize>() > 10_000);
    packets.iter().any(|packet| {
        let crossed = [&packet.bytes[..], &packet.tag].concat();
        crossed.windows(4).any(|window| PATTERN.repeat(2).windows(4).any(|part| part == window))
    })
}

#[test]
fn no_plaintext_crosses() {
    for algorithm in Algorithm::ALL {
        for key in [KeyLength::Aes128, KeyLength::Aes256] {
            assert!(!pattern_shows(Crypto::Gcm(key), algorithm), "{algorithm:?}");
        }
        assert!(pattern_shows(Crypto::None, algorithm), "the search finds what is there");
    }
}

/// With zeros as plaintext the ciphertext is the keystream. Over collectives, failed ones, epochs, sessions and a
/// restarted group under one secret, no block of it may come twice, except in records that were passed on or sent to
/// several ranks, which are the same as a whole.
#[test]
fn no_keystream_block_is_used_twice() {
    let mut blocks = HashSet::new();
    let mut total = 0;
    for algorithm in Algorithm::ALL.into_iter().chain(Algorithm::ALL) {
        let listener = Arc::new(Listener::default());
        let options = Options { algorithm, key_bytes: 32 << 10, ..options() };
        let mut group = tapped_group(3, &options, listener.clone());
        for round in 0..12 {
            // Some rounds fail in different places, and the sequence number is not used again.
            let spoil = (round % 3 == 1).then_some(5 * round);
            *listener.spoil.lock().unwrap() = spoil;
            let failed = on_all(&mut group, |rank| {
                let mut vector = vec![0_u8; 1500];
                match rank.all_reduce_in_place(&mut vector, ReduceOp::Sum) {
                    Ok(()) => false,
                    Err(Error::Record { .. }) => true,
                    Err(error) => panic!("{error}"),
                }
            });
            assert_eq!(failed.contains(&true), spoil.is_some(), "{algorithm:?} round {round}");
            if spoil.is_some() {
                on_all(&mut group, |rank| rank.rekey().unwrap());
            }
        }
        let packets = listener.packets.lock().unwrap();
        let records: HashSet<_> = packets.iter().map(|packet| (&packet.bytes, packet.tag)).collect();
        for (bytes, _) in records {
            for block in bytes.as_chunks::<16>().0 {
                total += 1;
                assert!(blocks.insert(*block), "{algorithm:?}: a keystream block came twice");
            }
        }
    }
    assert!(total > 10_000);
}

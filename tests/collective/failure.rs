//! Ranks that disagree, die or err: an error on every rank, in time, and nothing partial (cases.md 23).

use std::time::{Duration, Instant};

use ringseal::channel::GroupSecret;
use ringseal::collective::{Algorithm, Buffers, Communicator, Crypto, KeyLength, Options, Request};
use ringseal::{Dtype, Error, ReduceOp};

use crate::group::{PATIENT, group, on_all, on_each, options, secret};

/// For ranks that are waited for in vain.
const SHORT: Duration = Duration::from_millis(200);

/// What one rank means by the call.
#[derive(Clone, Copy)]
struct Meaning {
    request: Request,
    dtype: Dtype,
    count: usize,
    algorithm: Algorithm,
}

const SUM: Request = Request::AllReduce(ReduceOp::Sum);

/// Runs with one rank of another opinion, in each place; every rank must fail, soon, with zeros, and recover by rekeying.
fn disagree(crypto: Crypto, common: Meaning, other: Meaning) {
    for ranks in [2, 3, 4] {
        for dissenter in 0..ranks {
            let options = Options { crypto, timeout: SHORT, ..options() };
            let mut group = group(ranks, &options);
            let meaning = |rank: usize| if rank == dissenter { other } else { common };
            let mut vectors: Vec<_> = (0..ranks)
                .map(|rank| vec![0x11_u8; meaning(rank).count * meaning(rank).dtype.size()])
                .collect();
            let start = Instant::now();
            let results = on_each(&mut group, &mut vectors, |rank, vector| {
                let meaning = meaning(rank.rank());
                rank.set_algorithm(meaning.algorithm);
                rank.run(meaning.request, meaning.dtype, Buffers::InPlace(vector))
            });
            let what = format!("rank {dissenter} of {ranks}: {results:?}");
            assert!(start.elapsed() < 20 * SHORT, "{what}");
            for ((result, vector), rank) in results.iter().zip(&vectors).zip(&group) {
                let error = result.as_ref().expect_err(&what);
                assert!(matches!(error, Error::Record { .. } | Error::Deadline { .. }), "{what}");
                let meant = meaning(rank.rank()).request;
                let zeroed = match meant {
                    // Only the rank's own chunk was to be written.
                    Request::ReduceScatter(_) => vector.contains(&0),
                    _ => vector.iter().all(|byte| *byte == 0),
                };
                assert!(zeroed && rank.is_poisoned(), "{what}");
            }
            recover(&mut group);
        }
    }
}

/// Poisoned until rekeyed, then right.
fn recover(group: &mut [Communicator]) {
    let ranks = group.len() as u32;
    on_all(group, |rank| {
        let mut vector = [1_u32; 50];
        let refused = rank.all_reduce_in_place(&mut vector, ReduceOp::Sum).unwrap_err();
        assert!(matches!(refused, Error::Poisoned));
        assert_eq!(vector, [1; 50], "refused before anything happened");
        rank.set_timeout(PATIENT);
        rank.rekey().unwrap();
        rank.set_algorithm(Algorithm::Ring);
        rank.all_reduce_in_place(&mut vector, ReduceOp::Sum).unwrap();
        assert_eq!(vector, [ranks; 50]);
    });
}

#[test]
fn disagreement_is_an_error_on_every_rank() {
    let common = Meaning { request: SUM, dtype: Dtype::F32, count: 40, algorithm: Algorithm::RelayRing };
    let others = [
        Meaning { count: 41, ..common },
        Meaning { count: 0, ..common },
        Meaning { dtype: Dtype::I32, ..common },
        Meaning { dtype: Dtype::F64, count: 20, ..common },
        Meaning { request: Request::AllReduce(ReduceOp::Max), ..common },
        Meaning { algorithm: Algorithm::Ring, ..common },
        Meaning { algorithm: Algorithm::Direct, ..common },
        Meaning { algorithm: Algorithm::Tree, ..common },
        Meaning { request: Request::ReduceScatter(ReduceOp::Sum), ..common },
        Meaning { request: Request::AllGather, ..common },
        Meaning { request: Request::Broadcast { root: 1 }, ..common },
    ];
    for other in others {
        disagree(Crypto::Gcm(KeyLength::Aes128), common, other);
    }
}

/// Also about vectors so short that some ranks have nothing to send.
#[test]
fn disagreement_about_short_vectors_and_roots() {
    let none = Meaning { request: SUM, dtype: Dtype::U8, count: 0, algorithm: Algorithm::Ring };
    let gcm = Crypto::Gcm(KeyLength::Aes256);
    disagree(gcm, none, Meaning { count: 1, ..none });
    disagree(gcm, none, Meaning { dtype: Dtype::I8, ..none });
    disagree(gcm, Meaning { count: 2, ..none }, Meaning { count: 1, ..none });
    let broadcast = |root| Meaning { request: Request::Broadcast { root }, count: 9, ..none };
    disagree(gcm, broadcast(0), broadcast(1));
}

#[test]
fn the_plain_baseline_notices_disagreement_too() {
    let common = Meaning { request: SUM, dtype: Dtype::F32, count: 40, algorithm: Algorithm::Ring };
    disagree(Crypto::None, common, Meaning { count: 44, ..common });
    disagree(Crypto::None, common, Meaning { request: Request::AllReduce(ReduceOp::Min), ..common });
}

#[test]
fn a_rank_that_never_comes_is_a_deadline_for_the_others() {
    for algorithm in Algorithm::ALL {
        for absent in 0..4 {
            let mut group = group(4, &Options { algorithm, timeout: SHORT, ..options() });
            let start = Instant::now();
            let results = on_all(&mut group, |rank| {
                let mut vector = [1_u8; 40];
                let result = (rank.rank() != absent)
                    .then(|| rank.all_reduce_in_place(&mut vector, ReduceOp::Sum).unwrap_err());
                (result, vector)
            });
            assert!(start.elapsed() < 20 * SHORT);
            for (rank, (error, vector)) in results.into_iter().enumerate() {
                if rank == absent {
                    continue;
                }
                let Some(Error::Deadline { peer, waited_ms, .. }) = error else { panic!("{error:?}") };
                assert!(peer < 4 && waited_ms == 200, "{error:?}");
                assert_eq!(vector, [0; 40], "zeroed");
            }
        }
    }
}

/// Rekeying needs every rank; without one it fails in time, and later works.
#[test]
fn rekeying_without_a_rank_fails_and_can_be_tried_again() {
    let mut group = group(3, &Options { timeout: SHORT, ..options() });
    let results = on_all(&mut group, |rank| (rank.rank() != 1).then(|| rank.rekey()));
    for (rank, result) in results.into_iter().enumerate() {
        let Some(result) = result else { continue };
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Handshake(_)) && error.to_string().contains("[1]"), "{error}");
        assert!(group[rank].is_poisoned());
    }
    on_all(&mut group, |rank| {
        rank.set_timeout(PATIENT);
        rank.rekey().unwrap();
        let mut vector = [1_u8; 5];
        rank.all_reduce_in_place(&mut vector, ReduceOp::Sum).unwrap();
        assert_eq!(vector, [3; 5]);
    });
}

/// A rank that comes late finds the others gone, and is told whom they missed.
#[test]
fn a_late_rank_is_told() {
    let mut group = group(3, &Options { timeout: SHORT, ..options() });
    let results = on_all(&mut group, |rank| {
        if rank.rank() == 2 {
            std::thread::sleep(3 * SHORT);
        }
        rank.all_reduce_in_place(&mut [1_u8; 40], ReduceOp::Sum)
    });
    let told = results[2].as_ref().unwrap_err();
    assert!(matches!(told, Error::Deadline { rank: 0 | 1, .. }), "{told}");
}

#[test]
fn wrong_arguments_are_refused_and_poison_nothing() {
    let mut group = group(2, &options());
    on_all(&mut group, |rank| {
        let mut out = [7_u8; 10];
        let refused = [
            rank.all_reduce(&[1_u8; 9], &mut out, ReduceOp::Sum),
            rank.reduce_scatter(&[1_u8; 10], &mut out, ReduceOp::Sum),
            rank.all_gather(&[1_u8; 6], &mut out),
            rank.broadcast(&[1_u8; 9], &mut out, rank.rank()),
            rank.broadcast_in_place(&mut out, 2),
            rank.run(SUM, Dtype::F32, Buffers::InPlace(&mut out)),
        ];
        for result in refused {
            assert!(matches!(result, Err(Error::InvalidArgument(_))), "{result:?}");
        }
        assert_eq!((out, rank.session().collectives()), ([7; 10], 0));
        rank.all_reduce_in_place(&mut out, ReduceOp::Sum).unwrap();
        assert_eq!(out, [14; 10]);
    });
}

#[test]
fn the_longest_timeout_is_no_trouble() {
    let mut group = group(2, &Options { timeout: Duration::MAX, ..options() });
    on_all(&mut group, |rank| {
        rank.rekey().unwrap();
        rank.all_reduce_in_place(&mut [1_u8; 9], ReduceOp::Sum).unwrap();
    });
}

#[test]
fn options_out_of_their_domain_are_refused() {
    for record_bytes in [0, 8, 17, 100, (16 << 20) + 16] {
        let error =
            Communicator::in_process(2, &secret(), &Options { record_bytes, ..options() }).unwrap_err();
        assert!(error.to_string().contains(&record_bytes.to_string()), "{error}");
    }
    for ranks in [0, 1025, usize::MAX] {
        Communicator::in_process(ranks, &secret(), &options()).unwrap_err();
    }
}

#[test]
fn a_backend_that_cannot_is_an_error_and_never_plaintext() {
    struct Broken;
    impl ringseal::backend::Backend for Broken {
        fn name(&self) -> &'static str {
            "broken"
        }
        fn prepare(
            &self,
            _: &ringseal::aead::AesKey,
        ) -> ringseal::Result<Box<dyn ringseal::backend::PreparedKey>> {
            Err(Error::Unsupported { backend: "broken", what: "anything".into() })
        }
    }
    let mut group = group(3, &Options { backend: std::sync::Arc::new(Broken), ..options() });
    let results = on_all(&mut group, |rank| {
        let mut vector = [1_u8; 40];
        (rank.all_reduce_in_place(&mut vector, ReduceOp::Sum), vector)
    });
    for (result, vector) in results {
        assert!(matches!(result, Err(Error::Unsupported { .. } | Error::Aborted { .. })), "{result:?}");
        assert_eq!(vector, [0; 40]);
    }
}

/// Ranks that join one by one, as processes will.
#[test]
fn ranks_join_over_a_bootstrap_and_rekey_at_will() {
    use ringseal::collective::InProcess;
    use ringseal::transport::memory;
    let join = |secrets: [u8; 3]| {
        let parts: Vec<_> = memory::network(3).into_iter().zip(InProcess::group(3)).zip(secrets).collect();
        std::thread::scope(|scope| {
            let threads: Vec<_> = parts
                .into_iter()
                .map(|((link, bootstrap), secret)| {
                    scope.spawn(move || {
                        let secret = GroupSecret::from_bytes([secret; 32]);
                        Communicator::join(&secret, &options(), Box::new(link), Box::new(bootstrap))
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        })
    };
    let mut group: Vec<_> = join([1; 3]).into_iter().map(Result::unwrap).collect();
    let sessions = on_all(&mut group, |rank| {
        let mut sessions = Vec::new();
        for _ in 0..3 {
            let mut vector = [rank.rank() as f64; 30];
            rank.all_reduce_in_place(&mut vector, ReduceOp::Sum).unwrap();
            assert_eq!(vector, [3.0; 30]);
            sessions.push(rank.session().id());
            rank.rekey().unwrap();
        }
        sessions
    });
    assert!(sessions.iter().all(|session| *session == sessions[0]));
    assert!(sessions[0][0] != sessions[0][1] && sessions[0][1] != sessions[0][2]);
    for result in join([1, 1, 2]) {
        assert!(matches!(result, Err(Error::Handshake(_))), "{result:?}");
    }
}

/// The same over connections of the communicators' own: records longer than a socket's buffer, every collective, new
/// sessions, and a rank that leaves.
#[test]
fn ranks_join_over_sockets_and_notice_when_one_leaves() {
    use ringseal::collective::InProcess;
    let join = |secrets: [u8; 3]| {
        let parts: Vec<_> = InProcess::group(3).into_iter().enumerate().zip(secrets).collect();
        std::thread::scope(|scope| {
            let threads: Vec<_> = parts
                .into_iter()
                .map(|((rank, bootstrap), secret)| {
                    scope.spawn(move || {
                        let secret = GroupSecret::from_bytes([secret; 32]);
                        let options = Options { record_bytes: 8 << 20, ..options() };
                        Communicator::new(&secret, rank, 3, Box::new(bootstrap), &options)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        })
    };
    for result in join([1, 1, 2]) {
        assert!(matches!(result, Err(Error::Handshake(_))), "{result:?}");
    }
    let mut group: Vec<_> = join([1; 3]).into_iter().map(Result::unwrap).collect();
    on_all(&mut group, |rank| {
        for algorithm in Algorithm::ALL {
            rank.set_algorithm(algorithm);
            let mut vector = vec![rank.rank() as f32; 2_000_000];
            rank.all_reduce_in_place(&mut vector, ReduceOp::Sum).unwrap();
            assert!(vector.iter().all(|&sum| sum == 3.0));
            let mut vector = [rank.rank() as u8; 30];
            rank.broadcast_in_place(&mut vector, 2).unwrap();
            assert_eq!(vector, [2; 30]);
            rank.rekey().unwrap();
        }
    });
    drop(group.pop());
    let results = on_all(&mut group, |rank| {
        let mut vector = [1_u8; 40];
        (rank.all_reduce_in_place(&mut vector, ReduceOp::Sum), vector)
    });
    for (result, vector) in results {
        assert!(matches!(result, Err(Error::Lost { peer: 2, .. })), "{result:?}");
        assert_eq!(vector, [0; 40]);
    }
}

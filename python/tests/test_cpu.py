"""AES-GCM and collectives on the CPU, with NumPy only."""

import multiprocessing
import socket
import threading

import numpy as np
import pytest
import ringseal

SECRET = bytes(range(32))


def on_all(ranks, work):
    """Runs ``work`` on every rank in a thread; what each returned or raised."""
    outcomes = [None] * len(ranks)

    def run(at):
        try:
            outcomes[at] = work(ranks[at])
        except Exception as error:  # What a rank raised is what some tests look at.
            outcomes[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_the_specifications_second_test_case_and_a_round_trip():
    aead = ringseal.Aead(bytes(16))
    sealed, tag = aead.seal(bytes(12), bytes(16))
    assert sealed.hex() == "0388dace60b6a392f328c2b971b2fe78"
    assert tag.hex() == "ab6e47d42cec13bdf53a67b21257bddf"
    aead = ringseal.Aead(SECRET)
    sealed, tag = aead.seal(b"nonce", b"text", aad=b"data")
    assert aead.open(b"nonce", sealed, tag, aad=b"data") == b"text"
    assert aead.seal(b"nonce", b"")[0] == b""


def test_what_was_changed_is_refused():
    aead = ringseal.Aead(SECRET)
    sealed, tag = aead.seal(bytes(12), b"text", b"data")
    for arguments in [
        (bytes(12), sealed, tag, b"Data"),
        (bytes(12), b"Text", tag, b"data"),
        (bytes(11), sealed, tag, b"data"),
        (bytes(12), sealed, bytes(16), b"data"),
    ]:
        with pytest.raises(ringseal.AuthenticationError):
            aead.open(*arguments)
    mac = aead.gmac(bytes(12), b"data")
    aead.verify_gmac(bytes(12), b"data", mac)
    with pytest.raises(ringseal.AuthenticationError):
        aead.verify_gmac(bytes(12), b"date", mac)


def test_wrong_keys_and_tags_are_value_errors():
    for key in (b"", bytes(15)):
        with pytest.raises(ValueError, match="16, 24 or 32"):
            ringseal.Aead(key)
    with pytest.raises(ValueError, match="exactly 16"):
        ringseal.Aead(SECRET).open(bytes(12), b"", bytes(12))
    with pytest.raises(ValueError, match="tpu"):
        ringseal.Aead(SECRET, backend="tpu")


@pytest.mark.parametrize("schedule", ["relay-ring", "ring", "direct", "tree", "exchange"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "uint64"])
def test_every_collective(schedule, dtype):
    ranks, count = 3, 1001
    base = (np.arange(count) % 7).astype(dtype)

    def work(rank):
        mine = (base * (rank.rank + 1)).astype(dtype)
        total = rank.all_reduce(mine)
        assert total is not mine and np.array_equal(total, base * 6)
        chunk = rank.chunk(count)
        part = rank.reduce_scatter(mine, "max")
        assert np.array_equal(part, base[chunk] * 3)
        assert np.array_equal(rank.all_gather(part, count), base * 3)
        assert rank.broadcast(mine, root=1) is mine and np.array_equal(mine, base * 2)
        assert rank.all_reduce(mine, "avg", out=mine) is mine and np.array_equal(mine, base * 2)
        matrix = rank.all_reduce(np.ones((3, 4), dtype).T, "prod")
        assert matrix.shape == (4, 3) and matrix.all()
        assert rank.all_reduce(np.empty(0, dtype)).size == 0
        return "fine"

    assert on_all(ringseal.Communicator.group(ranks, schedule=schedule), work) == ["fine"] * ranks


def test_disagreement_is_an_error_on_every_rank_and_rekeying_helps():
    ranks = ringseal.Communicator.group(2, SECRET, protection="aes-128-gcm", timeout=10)

    def disagree(rank):
        vector = np.ones(100 + rank.rank, "float32")
        with pytest.raises(ringseal.AuthenticationError):
            rank.all_reduce(vector, out=vector)
        assert not vector.any() and rank.poisoned
        with pytest.raises(ringseal.PoisonedError):
            rank.all_reduce(vector)
        rank.rekey()
        return float(rank.all_reduce(np.ones(1))[0])

    assert on_all(ranks, disagree) == [2.0, 2.0]


def test_a_rank_that_does_not_come():
    ranks = ringseal.Communicator.group(2, timeout=0.05)
    with pytest.raises(ringseal.DeadlineError):
        ranks[0].all_reduce(np.ones(4))


def test_wrong_arguments():
    (alone,) = ringseal.Communicator.group(1)
    for array in (np.ones(3, "complex64"), np.ones(3, ">f4"), np.array(["text"])):
        with pytest.raises(ValueError):
            alone.all_reduce(array)
    with pytest.raises(ValueError, match="median"):
        alone.all_reduce(np.ones(3), "median")
    frozen = np.ones(3)
    frozen.flags.writeable = False
    for out in (np.ones(4), np.ones(3, "float32"), np.ones(6)[::2], frozen):
        with pytest.raises(ValueError):
            alone.all_reduce(np.ones(3), out=out)
    with pytest.raises(ValueError):
        alone.all_gather(np.ones(2), 3)
    with pytest.raises(ValueError):
        ringseal.Communicator.group(0)
    with pytest.raises(ValueError, match="32"):
        ringseal.Communicator.group(1, b"short")
    with pytest.raises(ValueError, match="gossip"):
        ringseal.Communicator.group(1, schedule="gossip")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def process(rank, ranks, port, secret, results):
    try:
        joined = ringseal.Communicator.join(secret, rank, ranks, f"127.0.0.1:{port}", timeout=20)
        total = joined.all_reduce(np.full(50_000, rank + 1, "int32"))
        joined.rekey()
        total = joined.all_reduce(total, "max")
        results.put((rank, int(total.min()), int(total.max())))
    except ringseal.Error as error:
        results.put((rank, type(error).__name__, str(error)))


def run_processes(secrets):
    context, port = multiprocessing.get_context("spawn"), free_port()
    results = context.Queue()
    processes = [
        context.Process(target=process, args=(rank, len(secrets), port, secret, results))
        for rank, secret in enumerate(secrets)
    ]
    for started in processes:
        started.start()
    outcomes = sorted(results.get(timeout=60) for _ in processes)
    for started in processes:
        started.join()
    return outcomes


def test_processes_join_by_rendezvous():
    assert run_processes([SECRET] * 3) == [(rank, 6, 6) for rank in range(3)]


def test_a_process_with_another_secret_is_no_member():
    outcomes = run_processes([SECRET, bytes(32)])
    assert [outcome[1] for outcome in outcomes] == ["HandshakeError"] * 2


def test_integers_are_no_secrets_keys_or_texts():
    for wrong in (
        lambda: ringseal.Communicator.group(2, secret=32),
        lambda: ringseal.Aead(32),
        lambda: ringseal.Aead(bytes(32)).seal(bytes(12), 5),
    ):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match="-1 elements"):
        ringseal.Communicator.group(1)[0].chunk(-1)


def test_what_a_gather_function_raises_is_the_cause():
    def gather(message, timeout):
        raise RuntimeError("no store")

    with pytest.raises(ringseal.HandshakeError) as caught:
        ringseal.Communicator.join(SECRET, 0, 2, gather)
    assert str(caught.value.__cause__) == "no store"

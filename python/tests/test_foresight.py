"""What is noted of a training's iteration, and when keystream is asked for; on the CPU, with a communicator that only listens."""

import pytest
import ringseal
from ringseal._foresight import Foresight, parts


class Listener:
    """A communicator that notes what keystream it is asked for."""

    def __init__(self):
        self.asked = []

    def make_keystream(self, lengths):
        self.asked.append(list(lengths))
        return len(lengths)


def iteration(foresight, buckets):
    for at, (count, size, dtype) in enumerate(buckets):
        foresight.reduced(count, size, dtype, at == len(buckets) - 1)


def test_keystream_is_asked_for_after_an_iterations_last_bucket_and_not_before():
    listener = Listener()
    foresight = Foresight(listener, 1 << 20)
    foresight.reduced(1000, 4, "float32", False)
    foresight.reduced(500, 2, "bfloat16", False)
    assert listener.asked == []
    foresight.reduced(7, 2, "float16", True)
    assert listener.asked == [[4000, 1000, 14]]
    # Other buckets, as DDP makes them after the first iteration.
    iteration(foresight, [(507, 4, "float32"), (1000, 4, "float32")])
    iteration(foresight, [(507, 4, "float32"), (1000, 4, "float32")])
    assert listener.asked[1:] == [[2028, 4000]] * 2


def test_every_all_reduce_has_its_place():
    listener = Listener()
    # A bucket that is reduced in three parts, one of a type that takes no keystream, and one with nothing in it.
    iteration(Foresight(listener, 4096), [(2100, 4, "float32"), (600, 8, "float64"), (0, 4, "float32"), (1, 4, "float32")])
    assert listener.asked == [[4096, 4096, 208, 0, 0, 4]]


def test_an_iteration_that_failed_is_forgotten():
    listener = Listener()
    foresight = Foresight(listener, 4096)
    foresight.reduced(1000, 4, "float32", False)
    foresight.forget()
    iteration(foresight, [(10, 4, "float32")])
    assert listener.asked == [[40]]


def test_parts_cover_all_elements_in_order():
    for count, size, max_bytes in [(0, 4, 64), (1, 4, 64), (16, 4, 64), (17, 4, 64), (1000, 8, 100)]:
        elements = [start + at for start, length in parts(count, size, max_bytes) for at in range(length)]
        assert elements == list(range(count))
        assert all(0 < length * size <= max_bytes for _, length in parts(count, size, max_bytes))


def test_impossible_keystream_is_refused():
    ringseal.KeystreamAhead(2, 1 << 20)
    for arguments in [(0, 1), (1, 0), (-1, 1), (1, 1, -1), (1, 1, 1 << 32)]:
        with pytest.raises(ValueError, match="positive"):
            ringseal.KeystreamAhead(*arguments)


def test_a_gpu_communicator_with_keystream_needs_a_gpu_that_is_there():
    with pytest.raises(ringseal.UnsupportedError):
        ringseal.GpuCommunicator(
            bytes(32), 0, 2, lambda message, timeout: [message] * 2, device=9999, max_bytes=1 << 20,
            keystream=ringseal.KeystreamAhead(2, 1 << 20),
        )


def test_when_keystream_ahead_pays():
    for budget, pays in ((16, True), (32, True), (64, False), (132, False), (None, False)):
        assert ringseal.KeystreamAhead.pays(budget, 132) is pays
    for budget, multiprocessors in ((0, 132), (-1, 132), (16, 0)):
        with pytest.raises(ValueError, match="must be positive"):
            ringseal.KeystreamAhead.pays(budget, multiprocessors)

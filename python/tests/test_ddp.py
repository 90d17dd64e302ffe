"""The gradient hooks, on processes that gloo brings together. On a GPU too where there is one."""

import socket
import traceback

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as multiprocessing  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from ringseal import KeystreamAhead  # noqa: E402
from ringseal._foresight import Foresight  # noqa: E402
from ringseal.ddp import (  # noqa: E402
    SealedState,
    sealed_all_gather,
    sealed_allreduce_hook,
    sealed_reduce_scatter,
)

SECRET = bytes(range(32))
# A GPU's gradients sealed by the CPU, by the GPU itself, and by the GPU with keystream that it made ahead of time.
DEVICES = ["cpu"] + (["cuda", "gpu-sealed", "gpu-ahead"] if torch.cuda.is_available() else [])


def model(device):
    torch.manual_seed(5)
    # The middle layers have more than the megabyte of DDP's first bucket, so there are several.
    widths, layers = [64, 600, 600, 600, 7], []
    for inputs, outputs in zip(widths, widths[1:]):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers).to(device)


def state_for(device, **options):
    if device in ("gpu-sealed", "gpu-ahead"):
        options["device"] = torch.device("cuda", 0)
    if device == "gpu-ahead" and options.get("protection") != "none":
        options["keystream"] = KeystreamAhead(collectives=8, bytes=4 << 20)
    return SealedState(SECRET, **options)


def gradients(device, hook=None, state=None):
    """This rank's gradients after one step, which many small buckets bring."""
    wrapped = DistributedDataParallel(model(device), bucket_cap_mb=0.02)
    if hook is not None:
        wrapped.register_comm_hook(state, hook)
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(2):  # DDP arranges its buckets anew after the first.
        wrapped.zero_grad()
        wrapped(torch.randn(16, 64).to(device)).square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in wrapped.parameters()]).cpu()


def averages(rank, device):
    state, plain = state_for(device), state_for(device, protection="none")
    device = "cpu" if device == "cpu" else "cuda"
    expected = gradients(device)
    sealed = gradients(device, sealed_allreduce_hook, state)
    torch.testing.assert_close(sealed, expected)
    assert torch.equal(sealed, gradients(device, sealed_allreduce_hook, plain))
    assert state.sequence == plain.sequence > 2, "several buckets, numbered by the state"
    compressed = gradients(device, bf16_compress_wrapper(sealed_allreduce_hook), state)
    torch.testing.assert_close(compressed, expected, rtol=0.05, atol=0.05)
    assert not torch.equal(compressed, expected)
    state.close()
    plain.close()


def a_failure_stops_the_step(rank, device):
    state, by_gpu = state_for(device, timeout=8), device in ("gpu-sealed", "gpu-ahead")
    device = "cpu" if device == "cpu" else "cuda"
    wrapped = DistributedDataParallel(model(device))
    wrapped.register_comm_hook(state, sealed_allreduce_hook)
    # A GPU whose records have other lengths may find one missing before it finds one wrong.
    failed = "authentication failed|nothing from rank"
    if rank == 0:
        loss = wrapped(torch.randn(16, 64).to(device)).square().sum()
        with pytest.raises(RuntimeError, match=failed):
            loss.backward()
    else:
        wrong = torch.ones(6, device=device)
        if by_gpu:
            future = state.collective(wrong, wrong, None, gpu_op="avg")
        else:
            future = sealed_reduce_scatter(state, torch.empty(3, device=device), wrong)
        with pytest.raises(RuntimeError, match=failed):
            future.wait()
        if not by_gpu:
            with pytest.raises(RuntimeError, match="failed before"):
                sealed_all_gather(state, torch.empty(6, device=device), wrong[:3]).wait()
    assert state.poisoned
    state.rekey()
    assert not state.poisoned
    part = torch.full((3,), float(rank), device=device)
    whole = sealed_all_gather(state, torch.empty(6, device=device), part).wait()
    assert whole.tolist() == [0, 0, 0, 1, 1, 1]
    assert gradients(device, sealed_allreduce_hook, state).isfinite().all()
    state.close()


def an_iteration_ends_with_its_last_bucket(rank, device):
    state, ends = SealedState(SECRET), []
    collective = state.collective

    def noting(*arguments, **options):
        ends.append(options["ends_iteration"])
        return collective(*arguments, **options)

    state.collective = noting
    gradients(device, bf16_compress_wrapper(sealed_allreduce_hook), state)
    assert len(ends) == state.sequence > 2
    assert ends.count(True) == 2 and ends[-1], "two iterations"
    with pytest.raises(ValueError, match="give a device"):
        SealedState(SECRET, keystream=KeystreamAhead(1, 1))
    for options in ({"transport": "nccl"}, {"node_ranks": 2}, {"sm_budget": 16}):
        with pytest.raises(ValueError, match="give a device"):
            SealedState(SECRET, **options)
    with pytest.raises(ValueError, match="not cpu"):
        SealedState(SECRET, device=torch.device("cpu"))
    state.close()
    state.close()
    for use in (state.rekey, lambda: collective(torch.ones(1), torch.ones(1), None)):
        with pytest.raises(RuntimeError, match="was closed"):
            use()
    assert not state.poisoned


def keystream_ahead(rank, device):
    state = state_for(device)
    wrapped = DistributedDataParallel(model("cuda"), bucket_cap_mb=0.02)
    wrapped.register_comm_hook(state, sealed_allreduce_hook)
    for step in range(5):
        before = state.keystream_misses
        wrapped.zero_grad()
        wrapped(torch.ones(16, 64, device="cuda")).square().sum().backward()
        torch.cuda.synchronize()
        # DDP has arranged its buckets anew by the second step. If they are fewer, some of the third step's have what was
        # made for the first's; the fourth has keystream of the right lengths.
        assert step < 3 or state.keystream_misses == before, step
        state._in_order(state._gpu.wait_for_keystream)
    assert state._foresight is not None
    state.close()


def shards(rank, device):
    state = SealedState(SECRET)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        whole = torch.arange(1000, device=device).remainder(8).to(dtype) * (rank + 1)
        part = torch.empty(500, dtype=dtype, device=device)
        future = sealed_reduce_scatter(state, part, whole, op="sum")
        assert future.wait() is not None
        assert torch.equal(part, (whole * 3 / (rank + 1))[rank * 500 : (rank + 1) * 500])
        gathered = torch.empty(1000, dtype=dtype, device=device)
        sealed_all_gather(state, gathered, part).wait()
        assert torch.equal(gathered, whole * 3 / (rank + 1))
    with pytest.raises(ValueError, match="2 times"):
        sealed_all_gather(state, torch.empty(3), torch.empty(1))
    with pytest.raises(ValueError, match="contiguous"):
        sealed_all_gather(state, torch.empty(8)[::2], torch.empty(2))
    with pytest.raises(ValueError, match="bool"):
        sealed_all_gather(state, torch.ones(2, dtype=torch.bool), torch.ones(1, dtype=torch.bool))
    state.close()


def rank_main(rank, ranks, port, work, device, outcomes):
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
        work(rank, device)
        outcomes.put("fine")
    except BaseException:
        outcomes.put(traceback.format_exc())
    dist.barrier()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "work, ranks",
    [
        (averages, 2),
        (averages, 4),
        (a_failure_stops_the_step, 2),
        (an_iteration_ends_with_its_last_bucket, 2),
        (keystream_ahead, 2),
        (shards, 2),
    ],
)
def test_on_processes(work, ranks, device):
    if device in ("gpu-sealed", "gpu-ahead") and work is shards:
        pytest.skip("only the all-reduce is done by GPUs")
    if device != "gpu-ahead" and work is keystream_ahead:
        pytest.skip("only a GPU that seals makes keystream ahead of time")
    if device != "cpu" and work is an_iteration_ends_with_its_last_bucket:
        pytest.skip("the same on all devices")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    outcomes = context.Queue()
    processes = [
        context.Process(target=rank_main, args=(rank, ranks, port, work, device, outcomes)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        assert [outcomes.get(timeout=120) for _ in processes] == ["fine"] * ranks
    finally:
        for process in processes:
            process.join(5)
            process.terminate()


class Listener:
    """A communicator that notes what keystream it is asked for, or can't make it."""

    def __init__(self, broken):
        self.asked, self.broken = [], broken

    def make_keystream(self, lengths):
        self.asked.append(list(lengths))
        if self.broken:
            raise RuntimeError("no keystream")
        return len(lengths)


@pytest.mark.parametrize("broken", [False, True])
def test_what_is_noted_of_an_iteration_never_fails_it(broken):
    listener, state = Listener(broken), object.__new__(SealedState)
    state._foresight = Foresight(listener, 1024)
    state._look_ahead(torch.zeros(300), False, True)
    state._look_ahead(torch.zeros(3), True, False)
    for _ in range(2):
        state._look_ahead(torch.zeros(300), False, True)
        state._look_ahead(torch.zeros(5, dtype=torch.bfloat16), False, True)
        state._look_ahead(torch.zeros(5, dtype=torch.float64), True, True)
    # Who can't make keystream isn't asked again.
    assert listener.asked == [[1024, 176, 10, 0]] * (1 if broken else 2)

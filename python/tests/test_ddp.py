"""The gradient hooks, on processes that gloo brings together. On a GPU too where there is one."""

import socket
import traceback

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as multiprocessing  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from ringseal.ddp import (  # noqa: E402
    SealedState,
    sealed_all_gather,
    sealed_allreduce_hook,
    sealed_reduce_scatter,
)

SECRET = bytes(range(32))
# A GPU's gradients sealed by the CPU, and by the GPU itself.
DEVICES = ["cpu"] + (["cuda", "gpu-sealed"] if torch.cuda.is_available() else [])


def model(device):
    torch.manual_seed(5)
    # The middle layers have more than the megabyte of DDP's first bucket, so there are several.
    widths, layers = [64, 600, 600, 600, 7], []
    for inputs, outputs in zip(widths, widths[1:]):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers).to(device)


def state_for(device, **options):
    if device == "gpu-sealed":
        options["device"] = torch.device("cuda", 0)
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
    state, by_gpu = state_for(device, timeout=8), device == "gpu-sealed"
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
@pytest.mark.parametrize("work, ranks", [(averages, 2), (averages, 4), (a_failure_stops_the_step, 2), (shards, 2)])
def test_on_processes(work, ranks, device):
    if device == "gpu-sealed" and work is shards:
        pytest.skip("only the all-reduce is done by GPUs")
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

"""DistributedDataParallel with gloo, with a plain hook over ringseal's links, and with the sealed hook: losses and times.

    python benches/ddp.py --out benches/results/ddp.json

Starts 2 and 4 processes on one GPU (or the CPU), a transformer and a ResNet on synthetic data, bucket caps of 25 and 400
MB. With `--gpus` on several GPUs; beside them DDP over NCCL, where each process has a GPU of its own. The losses of the
plain and the sealed hook must be the same bits. Needs the package `ringseal` and PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

import ringseal
from ringseal import KeystreamAhead
from ringseal.ddp import SealedState, sealed_allreduce_hook

# The proof is about sums and times, and its ranks have no secret from anyone: real ones come from attestation.
SECRET = bytes(range(32))
# How DDP comes, the second where each rank has a GPU of its own.
WITHOUT_HOOK = ("gloo", "nccl")
VARIANTS = (*WITHOUT_HOOK, "plain", "sealed", "sealed-bf16")


class Transformer(nn.Module):
    """A small language model: 27.4 million parameters by default."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens))).flatten(0, 1)


class Block(nn.Module):
    """Two convolutions around a shortcut (He et al., arXiv 1512.03385)."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(narrow, wide, 3, stride, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, wide, 3, 1, 1, bias=False),
            nn.BatchNorm2d(wide),
        )
        same = narrow == wide and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(narrow, wide, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


class Mean(nn.Module):
    """The mean over an image. PyTorch's pooling has no deterministic backward on a GPU."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3))


def resnet(width: int) -> nn.Module:
    """ResNet-18 for images of 32 by 32: 11.2 million parameters at a width of 64."""
    widths = [width, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
    blocks = [
        Block(narrow, wide, 2 if wide > narrow else 1) for narrow, wide in zip(widths, widths[1:])
    ]
    ends = nn.Conv2d(3, width, 3, 1, 1, bias=False), Mean(), nn.Linear(8 * width, 10)
    return nn.Sequential(ends[0], nn.BatchNorm2d(width), nn.ReLU(), *blocks, *ends[1:])


def workload(name: str, small: bool, device: torch.device) -> tuple[nn.Module, object]:
    """A model, and what makes a batch for it."""
    if name == "transformer":
        vocabulary, width, layers, length = (100, 64, 1, 8) if small else (8192, 512, 6, 128)

        def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
            tokens = torch.randint(vocabulary, (8, length + 1), generator=generator)
            return tokens[:, :-1].to(device), tokens[:, 1:].flatten().to(device)

        return Transformer(vocabulary, width, layers).to(device), batch

    def images(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        count = 4 if small else 32
        labels = torch.randint(10, (count,), generator=generator)
        return torch.randn(count, 3, 32, 32, generator=generator).to(device), labels.to(device)

    return resnet(8 if small else 64).to(device), images


def train(
    name: str, variant: str, cap_mb: int, iterations: int, small: bool, device: torch.device, states: dict,
    nccl: dist.ProcessGroup | None,
) -> dict:
    """Losses of this rank, and seconds of each iteration."""
    torch.manual_seed(1)
    model, batch = workload(name, small, device)
    group = nccl if variant == "nccl" else None
    wrapped = DistributedDataParallel(model, bucket_cap_mb=cap_mb, process_group=group)
    if variant not in WITHOUT_HOOK:
        hook = bf16_compress_wrapper(sealed_allreduce_hook) if variant == "sealed-bf16" else sealed_allreduce_hook
        wrapped.register_comm_hook(states["plain" if variant == "plain" else "sealed"], hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    losses, seconds = [], []
    for _ in range(iterations):
        inputs, targets = batch(generator)
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(wrapped(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    total = sum(parameter.numel() for parameter in model.parameters())
    return {"losses": losses, "seconds": seconds, "parameters": total}


def variants(ranks: int, arguments: argparse.Namespace) -> list[str]:
    """What runs, in this order."""
    own_gpus = arguments.device == "cuda" and ranks <= arguments.gpus
    return [variant for variant in VARIANTS if variant != "nccl" or own_gpus]


def rank_main(rank: int, ranks: int, port: int, arguments: argparse.Namespace, results: object) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUBLAS_WORKSPACE_CONFIG=":4096:8")
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    device = torch.device("cpu")
    nccl = None
    if arguments.device == "cuda":
        device = torch.device("cuda", rank % arguments.gpus)
        torch.cuda.set_device(device)
        if "nccl" in variants(ranks, arguments):
            nccl = dist.new_group(backend="nccl")
    else:
        torch.set_num_threads(1)
    # Sums of one process must not depend on how its kernels were scheduled.
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    protections = {"plain": "none", "sealed": arguments.protection}
    gpu = {}
    if device.type == "cuda" and not arguments.staged:
        gpu = {"device": device, "transport": arguments.transport}
    ahead = {}
    if arguments.keystream:
        # Longer buckets are reduced in parts of 64 MiB.
        ahead = {"keystream": KeystreamAhead(arguments.keystream, min(max(arguments.caps), 64) << 20)}
    states = {
        name: SealedState(SECRET, protection=kind, **gpu, **(ahead if name == "sealed" else {}))
        for name, kind in protections.items()
    }
    for cap_mb in arguments.caps:
        for name in arguments.models:
            for variant in variants(ranks, arguments):
                misses = states["sealed"].keystream_misses
                outcome = train(name, variant, cap_mb, arguments.iterations, arguments.small, device, states, nccl)
                if arguments.keystream and variant.startswith("sealed"):
                    outcome["keystream_misses"] = (states["sealed"].keystream_misses - misses) % 2**32
                gathered: list = [None] * ranks
                dist.all_gather_object(gathered, outcome)
                # An iteration is over when its slowest rank is. The first ones warm up.
                slowest = [max(each) for each in zip(*(other["seconds"] for other in gathered))]
                row = {
                    "model": name, "parameters": outcome["parameters"], "ranks": ranks, "bucket_cap_mb": cap_mb,
                    "variant": variant, "losses": [other["losses"] for other in gathered],
                    "milliseconds": 1e3 * statistics.median(slowest[min(5, len(slowest) // 2):]),
                }
                if "keystream_misses" in outcome:
                    row["keystream_misses"] = [other["keystream_misses"] for other in gathered]
                if rank == 0:
                    results.put(row)
    for state in states.values():
        state.close()
    if rank == 0:
        results.put(None)
    dist.destroy_process_group()


def save(rows: list[dict], arguments: argparse.Namespace) -> None:
    """Writes the figures so far, so that a run that is cut short leaves what it has."""
    if not arguments.out:
        return
    device = torch.cuda.get_device_name(0) if arguments.device == "cuda" else platform.processor() or "CPU"
    about = {
        "command": " ".join(["python", *sys.argv]), "device": device, "torch": torch.__version__,
        "ringseal": ringseal.__version__, "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "rows": rows,
    }
    with open(arguments.out, "w") as file:
        json.dump(about, file, indent=1)


def run(ranks: int, arguments: argparse.Namespace, before: list[dict]) -> list[dict]:
    """One group of processes, for all models, caps and variants; what of them was done within the time limit."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = multiprocessing.get_context("spawn").Queue()
    processes = multiprocessing.start_processes(
        rank_main, (ranks, port, arguments, results), nprocs=ranks, join=False, start_method="spawn"
    )
    rows, end = [], time.monotonic() + arguments.limit
    while time.monotonic() < end:
        try:
            row = results.get(timeout=0.5)
        except queue.Empty:
            processes.join(0)  # Raises what a rank raised.
            continue
        if row is None:
            while not processes.join(1):
                pass
            return rows
        rows.append(row)
        save(before + rows, arguments)
        case = f"{row['model']}, {ranks} ranks, cap {row['bucket_cap_mb']} MB, {row['variant']}"
        print(f"# {case}: {row['milliseconds']:.1f} ms", file=sys.stderr, flush=True)
    for process in processes.processes:
        process.kill()
    print(f"{ranks} ranks were not done within {arguments.limit:.0f} s: the table lacks cases", file=sys.stderr)
    return rows


def table(rows: list[dict]) -> str:
    """What docs/ddp.md shows."""
    lines = [
        "| model | parameters | ranks | bucket cap | gloo | NCCL | plain hook | sealed hook | sealed, bf16 | sealing adds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    cases = {(row["model"], row["ranks"], row["bucket_cap_mb"]): {} for row in rows}
    for row in rows:
        cases[row["model"], row["ranks"], row["bucket_cap_mb"]][row["variant"]] = row
    for (model, ranks, cap), by in cases.items():
        if any(variant not in by for variant in VARIANTS if variant != "nccl"):
            continue
        times = [f"{by[variant]['milliseconds']:.1f} ms" if variant in by else "" for variant in VARIANTS]
        added = by["sealed"]["milliseconds"] / by["plain"]["milliseconds"] - 1
        lines.append(
            f"| {model} | {by['gloo']['parameters'] / 1e6:.1f} M | {ranks} | {cap} MB | "
            + " | ".join(times) + f" | {100 * added:+.0f} % |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=["transformer", "resnet"], choices=["transformer", "resnet"])
    parser.add_argument("--caps", type=int, nargs="+", default=[25, 400], help="bucket caps in MB")
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--protection", default="aes-256-gcm", choices=["aes-256-gcm", "aes-128-gcm"])
    parser.add_argument("--small", action="store_true", help="tiny models, for a quick check")
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="rank r is on GPU r modulo N, beside NCCL where each has its own",
    )
    parser.add_argument(
        "--transport", default="peer", choices=["peer", "nccl"], help="what carries the records of GPUs that seal",
    )
    parser.add_argument("--staged", action="store_true", help="let the CPU seal, through host memory")
    parser.add_argument(
        "--keystream", type=int, default=0, metavar="N",
        help="let the GPU make the keystream of up to N buckets of the next iteration ahead of time",
    )
    parser.add_argument("--limit", type=float, default=600, help="seconds for each number of ranks")
    parser.add_argument("--out", help="a JSON file for all figures")
    arguments = parser.parse_args()
    if arguments.keystream and (arguments.device != "cuda" or arguments.staged):
        parser.error("--keystream: only GPUs that seal make it; leave --staged and --device cpu out")
    if arguments.keystream and arguments.transport == "nccl":
        parser.error("--transport nccl finds no keystream; leave --keystream out")
    rows: list[dict] = []
    for ranks in arguments.ranks:
        rows += run(ranks, arguments, rows)
    print(table(rows))

    compared = different = 0
    plain = {(r["model"], r["ranks"], r["bucket_cap_mb"]): r["losses"] for r in rows if r["variant"] == "plain"}
    for row in rows:
        if row["variant"] == "sealed":
            compared += 1
            different += row["losses"] != plain[row["model"], row["ranks"], row["bucket_cap_mb"]]
    print(f"losses of {compared - different} of {compared} sealed runs are those of the plain hook, bit for bit")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())

"""Gradient exchange for PyTorch: sealed hooks for DistributedDataParallel, and helpers for sharded training.

>>> state = ringseal.ddp.SealedState(secret)                            # doctest: +SKIP
>>> model.register_comm_hook(state, ringseal.ddp.sealed_allreduce_hook)  # doctest: +SKIP

With compression: ``model.register_comm_hook(state, bf16_compress_wrapper(sealed_allreduce_hook))``, from
``torch.distributed.algorithms.ddp_comm_hooks.default_hooks``.

Ranks exchange sealed records over links of their own; the process group only brings them together. Tensors on a GPU are
reduced and sealed by the GPU if the state was made with ``device``; otherwise, and in the helpers for sharded training,
they are copied to host memory and back and sealed by the CPU. Both happen on a stream beside the caller's.
"""

# No postponed annotations: DDP compares those of a hook with its own types.

import contextlib
import queue
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from ._communicator import Communicator, GpuCommunicator, KeystreamAhead
from ._foresight import Foresight, parts

__all__ = ["SealedState", "sealed_all_gather", "sealed_allreduce_hook", "sealed_reduce_scatter"]

_DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int32: "int32",
    torch.int64: "int64",
}


class SealedState:
    """This rank's part in sealed exchanges: a communicator, and a thread that does its collectives in order.

    Collectives are numbered by this object, in the order in which they are asked for, and the ranks check that they agree
    on number, length, type and operation: a bucket that comes in another order on some rank is an error, not a wrong sum.
    """

    def __init__(
        self,
        secret: bytes,
        process_group: dist.ProcessGroup | None = None,
        *,
        protection: str = "aes-256-gcm",
        schedule: str = "default",
        timeout: float = 30.0,
        host: str = "127.0.0.1",
        device: torch.device | None = None,
        max_bytes: int = 64 << 20,
        keystream: KeystreamAhead | None = None,
        transport: str = "peer",
        node_ranks: int | None = None,
        sm_budget: int | None = None,
    ) -> None:
        """Joins the other ranks of ``process_group`` (the default one if None), all of which must do so.

        ``secret`` has 32 bytes, the same on all ranks, from attestation or another trusted channel: never send it through
        the process group. ``protection`` "none" is the same exchange in the clear, for comparison. ``host`` is the IP
        address by which the other ranks reach this machine.

        With ``device``, a GPU, all-reduces of tensors on it are done by GPUs; mailboxes take four times ``max_bytes`` of its
        memory, and longer buckets are reduced in parts of that length. The GPUs must be of one machine, unless ``transport`` is
        "nccl", with which each rank has a GPU of its own on any machine that NCCL reaches, and ``node_ranks`` may say how many
        ranks a machine has: see :class:`GpuCommunicator`, which also says what was run. ``sm_budget`` leaves the other
        multiprocessors to the backward pass.

        With ``keystream`` too, which keeps it for that many buckets of that length, the GPU makes the next iteration's
        keystream after an iteration's last bucket, at low priority, while forward and backward run: see docs/ddp.md, also for
        when that pays.
        """
        if keystream is not None and device is None:
            raise ValueError("keystream is made ahead of time by GPUs: give a device")
        if (transport, node_ranks, sm_budget) != ("peer", None, None) and device is None:
            raise ValueError("transport, node_ranks and sm_budget are of GPUs: give a device")
        if device is not None:
            device = _gpu(device)
        rank, ranks = dist.get_rank(process_group), dist.get_world_size(process_group)

        def gather(message: bytes, _timeout: float) -> list[bytes]:
            messages: list = [None] * ranks
            dist.all_gather_object(messages, message, group=process_group)
            return messages

        self._communicator = Communicator.join(
            secret, rank, ranks, gather, protection=protection, schedule=schedule, timeout=timeout, host=host
        )
        self._gpu: GpuCommunicator | None = None
        self._foresight: Foresight | None = None
        self._device, self._max_bytes = device, max_bytes
        if device is not None:
            self._gpu = GpuCommunicator(
                secret, rank, ranks, gather, device=device.index, max_bytes=max_bytes,
                protection=protection, schedule=schedule, timeout=timeout, keystream=keystream,
                transport=transport, node_ranks=node_ranks, sm_budget=sm_budget,
            )
            if keystream is not None:
                self._foresight = Foresight(self._gpu, max_bytes)
        self._sequence = 0
        self._closed = self._poisoned = False
        self._staging: dict[torch.dtype, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ringseal", daemon=True)
        self._thread.start()

    @property
    def rank(self) -> int:
        """This rank, counted from 0."""
        return self._communicator.rank

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self._communicator.ranks

    @property
    def sequence(self) -> int:
        """How many collectives were asked for so far."""
        return self._sequence

    @property
    def poisoned(self) -> bool:
        """Whether a collective has failed. Call :meth:`rekey` on all ranks before the next one."""
        return self._poisoned

    def rekey(self) -> None:
        """Starts a new session with new keys, together with all other ranks, after what was asked for before."""

        def work() -> None:
            try:
                self._communicator.rekey()
                if self._gpu is not None:
                    self._gpu.rekey()
            finally:
                self._note()

        self._in_order(work)

    @property
    def keystream_misses(self) -> int:
        """Records so far, modulo 2^32, that found no keystream in all-reduces with some, of this rank."""
        misses: list[int] = []
        if self._gpu is not None:
            self._in_order(lambda: misses.append(self._gpu.keystream_misses))
        return sum(misses)

    def _in_order(self, work: Callable[[], None]) -> None:
        """Does ``work`` after what was asked for before, with the caller's GPU as the current one, and waits for it."""
        self._check_open()
        outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        # A thread has a current GPU of its own, and a process group of NCCL's gathers on that.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def there() -> None:
            with contextlib.nullcontext() if device is None else torch.cuda.device(device):
                work()

        self._work.put(lambda: outcomes.put(_outcome(there)))
        _raise(outcomes.get())

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the state was closed: it can't be used any more")

    def _note(self) -> None:
        """Notes whether a collective has failed: only the thread that does them may ask the communicators."""
        self._poisoned = self._communicator.poisoned or (self._gpu is not None and self._gpu.poisoned)

    def close(self) -> None:
        """Waits for what was asked for, then leaves the group. The state can't be used any more."""
        if self._closed:
            return
        self._closed = True
        self._work.put(None)
        self._thread.join()
        try:
            if self._gpu is not None:
                self._gpu.close()
        finally:
            self._communicator.close()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def collective(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        exchange: Callable[[Communicator, torch.Tensor, torch.Tensor], None] | None,
        gpu_op: str | None = None,
        ends_iteration: bool | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Queues ``exchange``, called with communicator and host tensors, from ``source`` to ``target``.

        The future's value is ``target``; its error, what the exchange raised. On a GPU it is a CUDA future: who waits for
        it makes the current stream wait. ``gpu_op`` says that it is an all-reduce, which a GPU can do, and of what kind;
        ``ends_iteration``, unless None, that it comes again in each iteration, and whether as the last.
        """
        self._check_open()
        for tensor in (source, target):
            if not tensor.is_contiguous() or tensor.device != source.device:
                raise ValueError("collectives need contiguous tensors on one device")
        if source.dtype not in _DTYPES or target.dtype != source.dtype:
            raise ValueError(f"no collectives from {source.dtype} to {target.dtype}")
        self._sequence += 1
        if source.device.type == "cuda":
            return self._on_gpu(source, target, exchange, gpu_op, ends_iteration)
        if source.device.type != "cpu":
            raise ValueError(f"no collectives on {source.device}")
        future: torch.futures.Future = torch.futures.Future()

        errors: list[BaseException | None] = []

        def work() -> None:
            errors.append(_outcome(lambda: exchange(self._communicator, source, target)))
            _outcome(self._note)
            future.set_result(target)

        self._work.put(work)
        return future.then(lambda done: _value(done, errors))

    def _on_gpu(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        exchange: Callable[[Communicator, torch.Tensor, torch.Tensor], None] | None,
        gpu_op: str | None,
        ends_iteration: bool | None,
    ) -> torch.futures.Future[torch.Tensor]:
        device = source.device
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = torch.cuda.Stream(device)
        ready = torch.cuda.current_stream(device).record_event()
        for tensor in (source, target):
            tensor.record_stream(side)
        future: torch.futures.Future = torch.futures.Future(devices=[device])
        errors: list[BaseException | None] = []

        def through_host() -> None:
            side.wait_event(ready)
            given, wanted = source.numel(), target.numel()
            host = self._host(source.dtype, given + wanted)
            host[:given].copy_(source.view(-1), non_blocking=True)
            side.synchronize()
            exchange(self._communicator, host[:given], host[given : given + wanted])
            target.view(-1).copy_(host[given : given + wanted], non_blocking=True)
            # The next collective writes to the same host memory.
            side.synchronize()

        def by_gpu() -> None:
            side.wait_event(ready)
            size, dtype = source.element_size(), _DTYPES[source.dtype]
            for start, count in parts(source.numel(), size, self._max_bytes):
                at = start * size
                self._gpu.all_reduce_at(
                    source.data_ptr() + at, target.data_ptr() + at, count, dtype, gpu_op, side.cuda_stream
                )
            # What failed must not pass for a gradient, so the verdict is awaited here, in this thread.
            if not self._gpu.outcome_waits:
                side.synchronize()
            self._gpu.outcome()

        on_gpu = gpu_op is not None and self._gpu is not None and device == self._device

        def work() -> None:
            # Whether gradients are recorded is a thread's own matter, and by default they are.
            with torch.no_grad(), torch.cuda.device(device), torch.cuda.stream(side):
                errors.append(_outcome(by_gpu if on_gpu else through_host))
                _outcome(self._note)
                # Marks the side stream's end: who takes the value waits for it.
                future.set_result(target)
                if on_gpu and ends_iteration is not None:
                    self._look_ahead(source, ends_iteration, errors[0] is None)

        self._work.put(work)
        return future.then(lambda done: _value(done, errors))

    def _look_ahead(self, reduced: torch.Tensor, ends_iteration: bool, went_well: bool) -> None:
        """Notes an all-reduce of an iteration. Nobody waits for this, so nothing is raised."""
        foresight = self._foresight
        if foresight is None:
            return
        if not went_well:
            foresight.forget()
            return
        count, size, dtype = reduced.numel(), reduced.element_size(), _DTYPES[reduced.dtype]
        if _outcome(lambda: foresight.reduced(count, size, dtype, ends_iteration)) is not None:
            # All-reduces do without. What is wrong with the GPU, they say too.
            self._foresight = None

    def _host(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Pinned memory for ``count`` elements, kept for the next collective."""
        kept = self._staging.get(dtype)
        if kept is None or kept.numel() < count:
            kept = self._staging[dtype] = torch.empty(count, dtype=dtype, pin_memory=True)
        return kept


def _gpu(device: torch.device) -> torch.device:
    """A GPU by its number, which tensors on it have in their device."""
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"device is the GPU that reduces gradients, not {device}")
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _outcome(work: Callable[[], None]) -> BaseException | None:
    """Does ``work``; what it raised."""
    try:
        work()
    except BaseException as error:
        return error
    return None


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _value(future: torch.futures.Future, errors: list[BaseException | None]) -> torch.Tensor:
    """The tensor, or the exception. Raised in a callback it is the future's error, which DDP's backward raises."""
    _raise(errors[0])
    return future.value()


def sealed_allreduce_hook(
    state: SealedState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients over all ranks, sealed. For ``DistributedDataParallel.register_comm_hook``."""
    gradients = bucket.buffer()

    def exchange(communicator: Communicator, source: torch.Tensor, target: torch.Tensor) -> None:
        communicator.all_reduce_at(
            source.data_ptr(), target.data_ptr(), source.numel(), _DTYPES[source.dtype], "avg"
        )

    return state.collective(gradients, gradients, exchange, gpu_op="avg", ends_iteration=bucket.is_last())


def sealed_reduce_scatter(
    state: SealedState, output: torch.Tensor, input: torch.Tensor, op: str = "avg"
) -> torch.futures.Future[torch.Tensor]:
    """Reduces ``input`` over all ranks; ``output`` gets this rank's part, one of as many equal ones as there are ranks."""
    if input.numel() != output.numel() * state.ranks:
        raise ValueError(f"{input.numel()} elements are not {state.ranks} times {output.numel()}")

    def exchange(communicator: Communicator, source: torch.Tensor, target: torch.Tensor) -> None:
        communicator.reduce_scatter_at(
            source.data_ptr(), target.data_ptr(), source.numel(), _DTYPES[source.dtype], op
        )

    return state.collective(input, output, exchange)


def sealed_all_gather(
    state: SealedState, output: torch.Tensor, input: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    """Gathers all ranks' ``input``, of equal lengths, in ``output``, in the order of the ranks."""
    if output.numel() != input.numel() * state.ranks:
        raise ValueError(f"{output.numel()} elements are not {state.ranks} times {input.numel()}")

    def exchange(communicator: Communicator, source: torch.Tensor, target: torch.Tensor) -> None:
        communicator.all_gather_at(
            source.data_ptr(), target.data_ptr(), target.numel(), _DTYPES[source.dtype]
        )

    return state.collective(input, output, exchange)

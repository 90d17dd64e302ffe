"""Collectives on NumPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from . import _library
from ._library import GATHER, SECRET_BYTES, Options, call

#: Gathers a message of every rank at every rank: given this rank's and a timeout in seconds, returns all, by rank. All
#: messages have the same length.
Gather = Callable[[bytes, float], "list[bytes]"]

_DTYPES = {
    "float32": 0,
    "float64": 1,
    "float16": 2,
    "bfloat16": 3,
    "int8": 4,
    "uint8": 5,
    "int32": 6,
    "uint32": 7,
    "int64": 8,
    "uint64": 9,
}
_OPS = {"sum": 0, "avg": 1, "min": 2, "max": 3, "prod": 4}
PROTECTIONS = {"aes-256-gcm": 0, "aes-128-gcm": 1, "none": 2}
_TRANSPORTS = {"peer": 0, "nccl": 1}
_SCHEDULES = {"default": 0, "relay-ring": 1, "ring": 2, "direct": 3, "tree": 4, "exchange": 5}


def code(kind: str, table: dict[str, int], name: str) -> int:
    """The library's number for ``name``."""
    try:
        return table[name]
    except KeyError:
        raise ValueError(f"no {kind} {name!r}; there are {', '.join(table)}") from None


@dataclass(frozen=True)
class KeystreamAhead:
    """How much keystream a :class:`GpuCommunicator` keeps of all-reduces to come.

    Of a vector of S bytes that is 2 S by an exchange of two ranks, and of n ranks about 3 S by a relay ring and 4 S by a
    ring, in the GPU's memory.
    """

    #: All-reduces whose keystream is kept at once: those that it is made for, and those that use it and are not over.
    collectives: int
    #: Bytes of the longest of them. A ring's longer one has no keystream, an exchange's none beyond.
    bytes: int
    #: Multiprocessors that make keystream at a time; 0: all.
    makers: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.collectives < 1 << 32 and 0 < self.bytes < 1 << 48 and 0 <= self.makers < 1 << 32):
            raise ValueError(f"{self}: numbers must be positive, and makers 0 or more")

    @staticmethod
    def pays(sm_budget: int | None, multiprocessors: int) -> bool:
        """Whether it shortens a training's iterations whose all-reduces take ``sm_budget`` of a GPU's ``multiprocessors``.

        It does where they are at most a quarter, as measured beside matrix products on two H200s; without a budget they
        take all. A GPU that idles between iterations can gain with more.
        """
        budget = 0 if sm_budget is None else sm_budget
        if not (0 <= budget < 1 << 32 and 0 < multiprocessors < 1 << 32) or sm_budget == 0:
            raise ValueError(f"sm_budget {sm_budget} of {multiprocessors}: numbers must be positive")
        return _library.keystream_pays(budget, multiprocessors)


def _options(
    protection: str,
    schedule: str,
    backend: str,
    record_bytes: int,
    timeout: float,
    host: str,
    keystream: KeystreamAhead | None = None,
    transport: str = "peer",
    node_ranks: int | None = None,
    sm_budget: int | None = None,
) -> Options:
    if node_ranks is not None and node_ranks < 1:
        raise ValueError(f"nodes of {node_ranks} ranks")
    if sm_budget is not None and not 0 < sm_budget < 1 << 32:
        raise ValueError(f"sm_budget {sm_budget}: give a positive number of multiprocessors, or None for all")
    kept = {}
    if keystream is not None:
        kept = {
            "keystream_collectives": keystream.collectives,
            "keystream_bytes": keystream.bytes,
            "keystream_makers": keystream.makers,
        }
    return Options(
        struct_bytes=ctypes.sizeof(Options),
        protection=code("protection", PROTECTIONS, protection),
        schedule=code("schedule", _SCHEDULES, schedule),
        backend=backend.encode(),
        record_bytes=record_bytes,
        timeout_ms=_milliseconds(timeout),
        host=host.encode(),
        transport=code("transport", _TRANSPORTS, transport),
        node_ranks=node_ranks or 0,
        sm_budget=sm_budget or 0,
        **kept,
    )


def _milliseconds(seconds: float) -> int:
    if not 0 < seconds < 1e9:
        raise ValueError(f"a timeout of {seconds} seconds")
    return max(1, round(seconds * 1000))


def check_secret(secret: bytes) -> bytes:
    """The secret, which has the length of one."""
    # Not of an integer, of which bytes() would make as many zeros.
    secret = bytes(memoryview(secret))
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a group secret has {SECRET_BYTES} bytes, not {len(secret)}")
    return secret


def _chunk(count: int, ranks: int, rank: int) -> slice:
    if count < 0:
        raise ValueError(f"a vector of {count} elements")
    begin, end = ctypes.c_size_t(), ctypes.c_size_t()
    call("ringseal_chunk", count, ranks, rank, ctypes.byref(begin), ctypes.byref(end))
    return slice(begin.value, end.value)


class Communicator:
    """One rank of a group that does collectives together.

    All ranks call the same methods in the same order. When a record does not verify, a rank does not deliver in time, or
    the ranks disagree on the call, every rank gets an exception, its result is zeros, and the communicator carries no
    data until all ranks have called :meth:`rekey`.

    One thread at a time may use a communicator. Python's other threads run while one waits.
    """

    def __init__(self, handle: ctypes.c_void_p, callback: object = None) -> None:
        """Takes a handle of the library's. Use :meth:`group` or :meth:`join`."""
        self._handle, self._callback = handle, callback
        rank, ranks = ctypes.c_size_t(), ctypes.c_size_t()
        call("ringseal_communicator_info", handle, ctypes.byref(rank), ctypes.byref(ranks), None)
        self._rank, self._ranks = rank.value, ranks.value

    @classmethod
    def group(
        cls,
        ranks: int,
        secret: bytes | None = None,
        *,
        protection: str = "aes-256-gcm",
        schedule: str = "default",
        backend: str = "cpu",
        record_bytes: int = 0,
        timeout: float = 30.0,
    ) -> list[Communicator]:
        """Makes all ranks of a group in this process. Use each in a thread of its own.

        ``protection`` is "aes-256-gcm", "aes-128-gcm" or, for comparison, "none"; ``schedule`` is "default", "relay-ring",
        "ring", "direct", "tree" or "exchange" (one hop, for two ranks); ``timeout``, in seconds, is how long to wait for a rank.
        Without ``secret`` the group has one of its own.
        """
        options = _options(protection, schedule, backend, record_bytes, timeout, "127.0.0.1")
        if not 0 < ranks < 1 << 15:
            raise ValueError(f"{ranks} ranks")
        handles = (ctypes.c_void_p * ranks)()
        given = None if secret is None else check_secret(secret)
        call("ringseal_communicator_create_group", given, ranks, ctypes.byref(options), handles)
        return [cls(ctypes.c_void_p(handle)) for handle in handles]

    @classmethod
    def join(
        cls,
        secret: bytes,
        rank: int,
        ranks: int,
        rendezvous: str | Gather,
        *,
        host: str = "127.0.0.1",
        protection: str = "aes-256-gcm",
        schedule: str = "default",
        backend: str = "cpu",
        record_bytes: int = 0,
        timeout: float = 30.0,
    ) -> Communicator:
        """Joins a group whose ranks are processes. Returns when all have joined.

        ``secret`` has 32 bytes, the same on all ranks, from attestation or another trusted channel. The ranks find each
        other at ``rendezvous``, "unix:PATH" or "HOST:PORT", where rank 0 listens; or by a function of the caller's, called
        here and in :meth:`rekey`, and then ``host`` is the IP address by which the others reach this machine. What they
        say there needs no protection.
        """
        options = _options(protection, schedule, backend, record_bytes, timeout, host)
        if not 0 <= rank < ranks < 1 << 15:
            raise ValueError(f"rank {rank} of {ranks}")
        secret, handle = check_secret(secret), ctypes.c_void_p()
        common, out = (secret, rank, ranks, ctypes.byref(options)), ctypes.byref(handle)
        if isinstance(rendezvous, str):
            call("ringseal_communicator_create_rendezvous", *common, rendezvous.encode(), out)
            return cls(handle)
        callback = _Callback(rendezvous, ranks)
        with callback:
            call("ringseal_communicator_create", *common, callback.function, None, out)
        return cls(handle, callback)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the group and closes its links."""
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            _library.destroy("ringseal_communicator_destroy", handle)

    @property
    def rank(self) -> int:
        """This rank, counted from 0."""
        return self._rank

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self._ranks

    @property
    def poisoned(self) -> bool:
        """Whether a collective has failed and :meth:`rekey` is needed."""
        poisoned = ctypes.c_bool()
        call("ringseal_communicator_info", self._handle, None, None, ctypes.byref(poisoned))
        return poisoned.value

    def set_timeout(self, seconds: float) -> None:
        """Waits at most this long for a rank from now on."""
        call("ringseal_communicator_set_timeout", self._handle, _milliseconds(seconds))

    def rekey(self) -> None:
        """Starts a new session with new keys, together with all other ranks."""
        with self._callback or _Callback(None, 0):
            call("ringseal_communicator_rekey", self._handle)

    def chunk(self, count: int) -> slice:
        """Which elements of a vector of ``count`` are this rank's in a reduce-scatter and an all-gather."""
        return _chunk(count, self._ranks, self._rank)

    def all_reduce(self, array: np.ndarray, op: str = "sum", out: np.ndarray | None = None) -> np.ndarray:
        """Reduces ``array`` over all ranks: all get the same bits. ``op`` is "sum", "avg", "min", "max" or "prod".

        The result goes to ``out``, which may be ``array`` itself; to a new array if there is none.
        """
        array = _contiguous(array)
        out = _result(out, array.shape, array.dtype)
        self.all_reduce_at(array.ctypes.data, out.ctypes.data, array.size, array.dtype.name, op)
        return out

    def reduce_scatter(self, array: np.ndarray, op: str = "sum", out: np.ndarray | None = None) -> np.ndarray:
        """Reduces ``array`` over all ranks; this rank gets its :meth:`chunk` of the flat result."""
        array = _contiguous(array)
        chunk = self.chunk(array.size)
        out = _result(out, (chunk.stop - chunk.start,), array.dtype)
        self.reduce_scatter_at(array.ctypes.data, out.ctypes.data, array.size, array.dtype.name, op)
        return out

    def all_gather(self, array: np.ndarray, count: int, out: np.ndarray | None = None) -> np.ndarray:
        """Gathers all ranks' ``array``, each its :meth:`chunk` of a flat vector of ``count`` elements."""
        array = _contiguous(array)
        chunk = self.chunk(count)
        if array.size != chunk.stop - chunk.start:
            raise ValueError(f"{array.size} elements; this rank's chunk of {count} has {chunk.stop - chunk.start}")
        out = _result(out, (count,), array.dtype)
        self.all_gather_at(array.ctypes.data, out.ctypes.data, count, array.dtype.name)
        return out

    def broadcast(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        """Gives rank ``root``'s ``array`` to all ranks, in place; all give one of the same shape and type."""
        array = _result(array, array.shape, array.dtype)
        self.broadcast_at(array.ctypes.data, array.ctypes.data, array.size, array.dtype.name, root)
        return array

    def all_reduce_at(self, source: int, target: int, count: int, dtype: str, op: str = "sum") -> None:
        """:meth:`all_reduce` at addresses of host memory, which must hold ``count`` elements each."""
        codes = code("element type", _DTYPES, dtype), code("reduction", _OPS, op)
        call("ringseal_all_reduce", self._handle, source, target, count, *codes)

    def reduce_scatter_at(self, source: int, target: int, count: int, dtype: str, op: str = "sum") -> None:
        """:meth:`reduce_scatter` at addresses of host memory; ``count`` is that of the whole vector."""
        codes = code("element type", _DTYPES, dtype), code("reduction", _OPS, op)
        call("ringseal_reduce_scatter", self._handle, source, target, count, *codes)

    def all_gather_at(self, source: int, target: int, count: int, dtype: str) -> None:
        """:meth:`all_gather` at addresses of host memory; ``count`` is that of the whole vector."""
        call("ringseal_all_gather", self._handle, source, target, count, code("element type", _DTYPES, dtype))

    def broadcast_at(self, source: int, target: int, count: int, dtype: str, root: int) -> None:
        """:meth:`broadcast` at addresses of host memory."""
        call("ringseal_broadcast", self._handle, source, target, count, code("element type", _DTYPES, dtype), root)


class GpuCommunicator:
    """One rank of a group of processes with GPUs: collectives on device memory, sealed by the GPU itself. As
    :class:`Communicator` otherwise.

    The collectives' addresses are device addresses, such as ``tensor.data_ptr()``. They queue on the CUDA stream ``stream``
    and don't wait: wait for the stream and ask :meth:`outcome` before a result is used. A rank's collectives run one after
    another, on whatever streams they are; of a captured graph's launches the caller must see to that. ``count`` is that of the whole
    vector. In place, a chunk lies where the whole vector has it; otherwise source and target lie apart.

    With ``transport`` "peer" the processes are of one machine, each with a GPU or a share of one. With "nccl" they are on any
    machines that NCCL reaches, each with a GPU of its own: ask :meth:`outcome` without waiting for the stream, which waits
    for ever for a rank that stays away; :meth:`outcome` gives up after the timeout. Run on two H200s of one
    machine, not yet on several machines.
    """

    def __init__(
        self,
        secret: bytes,
        rank: int,
        ranks: int,
        gather: Gather,
        *,
        device: int,
        max_bytes: int,
        protection: str = "aes-256-gcm",
        schedule: str = "default",
        timeout: float = 30.0,
        keystream: KeystreamAhead | None = None,
        transport: str = "peer",
        node_ranks: int | None = None,
        sm_budget: int | None = None,
    ) -> None:
        """Joins as rank ``rank`` of ``ranks`` on the GPU numbered ``device``. No vector is longer than ``max_bytes``.

        ``schedule`` is "default", "relay-ring", "ring", "direct", "tree" or "exchange". ``keystream`` is what
        :meth:`make_keystream` may make; sealed rings and relay rings can have it, and exchanges of two ranks.

        ``transport`` is "peer" or "nccl", which has rings and the exchange of two ranks, and no keystream. Without NCCL
        (``libnccl.so.2``) it raises :class:`UnsupportedError`; two ranks on one GPU are a :class:`ValueError`. With
        ``node_ranks`` too, rank r is in node r // ``node_ranks``; all-reduces, the only collectives then, sum inside nodes as
        "peer" does and between them by NCCL, and return when they are done.

        ``sm_budget`` is how many multiprocessors a collective may take, so that what computes beside it has the others; the rank
        with the fewest decides for all.
        """
        options = _options(
            protection, schedule, "cpu", 0, timeout, "127.0.0.1", keystream, transport, node_ranks, sm_budget
        )
        if not 0 <= rank < ranks <= 1 << 12:
            raise ValueError(f"rank {rank} of {ranks}")
        self._rank, self._ranks, self._transport = rank, ranks, transport
        self._callback, self._handle = _Callback(gather, ranks), ctypes.c_void_p()
        with self._callback:
            call(
                "ringseal_gpu_communicator_create",
                check_secret(secret), rank, ranks, device, max_bytes, ctypes.byref(options),
                self._callback.function, None, ctypes.byref(self._handle),
            )

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            _library.destroy("ringseal_gpu_communicator_destroy", handle)

    def close(self) -> None:
        """Leaves in good order, together with all other ranks."""
        handle, self._handle = self._handle, None
        if handle:
            with self._callback:
                call("ringseal_gpu_communicator_close", handle)

    @property
    def poisoned(self) -> bool:
        """Whether a collective has failed and :meth:`rekey` is needed."""
        poisoned = ctypes.c_bool()
        call("ringseal_gpu_communicator_poisoned", self._handle, ctypes.byref(poisoned))
        return poisoned.value

    def rekey(self) -> None:
        """Starts a new session with new keys, together with all other ranks."""
        with self._callback:
            call("ringseal_gpu_communicator_rekey", self._handle)

    def all_reduce_at(self, source: int, target: int, count: int, dtype: str, op: str, stream: int) -> None:
        """Queues an all-reduce of ``count`` elements."""
        codes = code("element type", _DTYPES, dtype), code("reduction", _OPS, op)
        call("ringseal_gpu_all_reduce", self._handle, source, target, count, *codes, stream)

    def reduce_scatter_at(self, source: int, target: int, count: int, dtype: str, op: str, stream: int) -> None:
        """Queues a reduce-scatter; ``target`` gets this rank's :meth:`chunk`."""
        codes = code("element type", _DTYPES, dtype), code("reduction", _OPS, op)
        call("ringseal_gpu_reduce_scatter", self._handle, source, target, count, *codes, stream)

    def all_gather_at(self, source: int, target: int, count: int, dtype: str, stream: int) -> None:
        """Queues an all-gather; ``source`` has this rank's :meth:`chunk`."""
        dtype_code = code("element type", _DTYPES, dtype)
        call("ringseal_gpu_all_gather", self._handle, source, target, count, dtype_code, stream)

    def broadcast_at(self, source: int, target: int, count: int, dtype: str, root: int, stream: int) -> None:
        """Queues the copying of rank ``root``'s vector to all; the other ranks' ``source`` is not looked at and may be 0."""
        dtype_code = code("element type", _DTYPES, dtype)
        call("ringseal_gpu_broadcast", self._handle, source, target, count, dtype_code, root, stream)

    def chunk(self, count: int) -> slice:
        """Which elements of a vector of ``count`` are this rank's in a reduce-scatter and an all-gather."""
        return _chunk(count, self._ranks, self._rank)

    def make_keystream(self, lengths: Sequence[int]) -> int:
        """Has keystream made for the next collectives, on a stream of low priority, and doesn't wait.

        They are taken to be all-reduces of float32, float16 or bfloat16 sums or averages, of ``lengths`` bytes each, in this
        order. Returns for how many of them, from the first on, there is or will be keystream. A ring uses it when all of the
        collective's is ready as it is launched, an exchange what is ready when it gets to a record; else it is made on the way.
        What was made for another collective or length is wiped unused, and what earlier collectives have used is wiped now,
        if they are over. Results are the same, and other ranks need not do it.
        """
        if any(length < 0 for length in lengths):
            raise ValueError(f"lengths must not be negative: {list(lengths)}")
        made = ctypes.c_size_t()
        given = (ctypes.c_size_t * len(lengths))(*lengths)
        call("ringseal_gpu_make_keystream", self._handle, given, len(lengths), ctypes.byref(made))
        return made.value

    def wait_for_keystream(self) -> None:
        """Waits until all keystream that was asked for is made, collectives are over, and all that they used is wiped."""
        call("ringseal_gpu_wait_for_keystream", self._handle)

    @property
    def keystream_misses(self) -> int:
        """Records so far, modulo 2^32, that found no keystream in collectives with some. Wait for their stream first."""
        misses = ctypes.c_uint32()
        call("ringseal_gpu_keystream_misses", self._handle, ctypes.byref(misses))
        return misses.value

    @property
    def outcome_waits(self) -> bool:
        """Whether :meth:`outcome` waits for the collectives itself, and the stream is not to be waited for before."""
        return self._transport == "nccl"

    def outcome(self) -> None:
        """Raises what went wrong in the collectives that the stream has passed; see :attr:`outcome_waits`."""
        call("ringseal_gpu_outcome", self._handle)


class _Callback:
    """A gather function as the library calls it. What it raises comes out of the ``with`` block that it was called in."""

    def __init__(self, gather: Gather | None, ranks: int) -> None:
        self._raised: BaseException | None = None

        def function(_user: int, message: int, count: int, gathered: int, timeout_ms: int) -> int:
            try:
                messages = gather(ctypes.string_at(message, count), timeout_ms / 1000)
                if len(messages) != ranks or any(len(message) != count for message in messages):
                    raise ValueError(f"the gather function did not return {ranks} messages of {count} bytes")
                ctypes.memmove(gathered, b"".join(messages), ranks * count)
                return 0
            except BaseException as error:
                self._raised = error
                return 1

        self.function = GATHER(function)

    def __enter__(self) -> None:
        self._raised = None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._raised is not None:
            raise error from self._raised


def _contiguous(array: np.ndarray) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.byteorder == ">" or array.dtype.name not in _DTYPES:
        raise ValueError(f"no collectives on elements of type {array.dtype}; there are {', '.join(_DTYPES)}")
    return np.ascontiguousarray(array).reshape(array.shape)


def _result(out: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if out is None:
        return np.empty(shape, dtype)
    if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"the result needs a contiguous, writable array of shape {shape} and type {dtype}")
    _contiguous(out)
    return out

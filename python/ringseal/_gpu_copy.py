"""Sealed copies between NumPy arrays and device memory."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from . import _library
from ._communicator import PROTECTIONS, check_secret, code
from ._library import CopyOptions, call


class GpuCopy:
    """Copies between host memory and one GPU's of which only ciphertext and tags lie in the pinned staging memory that the
    GPU's copy engine reads and writes, and travel over the bus.

    Device memory is an address, a multiple of 16, such as ``tensor.data_ptr()``; or a contiguous PyTorch tensor on the GPU or
    an object with ``__cuda_array_interface__`` (CuPy, Numba), which must have just as many bytes as the NumPy array. A copy
    begins when the work that is on ``stream`` is done (a number such as ``torch.cuda.current_stream().cuda_stream``; 0 is the
    default stream) and is done when the call returns; any stream may use the result then. A stream that is being captured
    is refused.

    When a record does not verify, the call raises :class:`ringseal.AuthenticationError`, all of the destination is zeros, and
    further copies raise :class:`ringseal.PoisonedError` until :meth:`rekey`. One thread at a time may use an object;
    Python's other threads run while a copy is made, and must leave its memory alone.
    """

    def __init__(
        self,
        secret: bytes,
        device: int = 0,
        *,
        protection: str = "aes-256-gcm",
        record_bytes: int = 0,
        piece_records: int = 0,
        slots: int = 0,
        threads: int = 0,
        key_bytes: int = 0,
    ) -> None:
        """Prepares copies to and from the GPU that CUDA numbers ``device``, and loads the kernels: keep the object.

        The keys come from ``secret``, 32 bytes, and fresh randomness. ``protection`` is "aes-256-gcm" or "aes-128-gcm".
        ``record_bytes`` are sealed as one message (default 65536); ``piece_records`` of them move at once (64); ``slots`` such
        pieces have pinned staging memory (8); ``threads`` seal and open on the host (one for each processor but one); a key
        encrypts at most ``key_bytes``. 0 is the default of each.

        Raises :class:`ringseal.UnsupportedError` without a usable GPU of compute capability 8.0.
        """
        sizes = {
            "record_bytes": record_bytes, "piece_records": piece_records, "slots": slots, "threads": threads,
            "key_bytes": key_bytes,
        }
        for name, value in sizes.items():
            if not 0 <= value < 1 << 63:
                raise ValueError(f"{name} is {value}")
        options = CopyOptions(
            struct_bytes=ctypes.sizeof(CopyOptions), protection=code("protection", PROTECTIONS, protection), **sizes
        )
        if device < 0:
            raise ValueError(f"device {device}")
        self._device, self._handle = device, ctypes.c_void_p()
        call("ringseal_gpu_copy_create", check_secret(secret), device, ctypes.byref(options), ctypes.byref(self._handle))

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            _library.destroy("ringseal_gpu_copy_destroy", handle)

    def to_device(self, array: np.ndarray, target: Any, stream: int = 0) -> None:
        """Copies a contiguous NumPy array to the device memory ``target``."""
        array = _host_array(array)
        at = _device_address(target, array.nbytes, self._device, writes=True)
        self.to_device_at(array.ctypes.data, at, array.nbytes, stream)

    def to_host(self, source: Any, out: np.ndarray, stream: int = 0) -> np.ndarray:
        """Copies the device memory ``source`` to the contiguous NumPy array ``out``, and returns that."""
        out = _host_array(out)
        if not out.flags.writeable:
            raise ValueError("the result needs a writable array")
        at = _device_address(source, out.nbytes, self._device, writes=False)
        self.to_host_at(at, out.ctypes.data, out.nbytes, stream)
        return out

    def to_device_at(self, source: int, target: int, count: int, stream: int = 0) -> None:
        """Copies ``count`` bytes from the host address ``source`` to the device address ``target``."""
        call("ringseal_gpu_copy_to_device", self._handle, target, source, count, stream)

    def to_host_at(self, source: int, target: int, count: int, stream: int = 0) -> None:
        """Copies ``count`` bytes from the device address ``source`` to the host address ``target``."""
        call("ringseal_gpu_copy_to_host", self._handle, target, source, count, stream)

    def rekey(self, secret: bytes) -> None:
        """Begins anew under other keys, from a secret, which may be the same, and fresh randomness."""
        call("ringseal_gpu_copy_rekey", self._handle, check_secret(secret))

    @property
    def poisoned(self) -> bool:
        """Whether a copy has failed and :meth:`rekey` is needed."""
        poisoned = ctypes.c_bool()
        call("ringseal_gpu_copy_poisoned", self._handle, ctypes.byref(poisoned))
        return poisoned.value


def _host_array(array: np.ndarray) -> np.ndarray:
    """The array itself: a copy of it would be plaintext that the caller doesn't know of."""
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or array.dtype.hasobject:
        raise ValueError("a sealed copy needs a contiguous NumPy array of plain elements")
    return array


def _device_address(memory: Any, count: int, device: int, *, writes: bool) -> int:
    """Where ``count`` bytes of device memory lie, given by address or by an object that says how many it has."""
    if isinstance(memory, int):
        return memory
    if hasattr(memory, "data_ptr"):
        if (memory.device.type, memory.device.index) != ("cuda", device):
            raise ValueError(f"the tensor is on {memory.device}; these copies are for cuda:{device}")
        contiguous, found, address = memory.is_contiguous(), memory.numel() * memory.element_size(), memory.data_ptr()
    elif hasattr(memory, "__cuda_array_interface__"):
        interface = memory.__cuda_array_interface__
        address, read_only = interface["data"]
        if writes and read_only:
            raise ValueError("the device array is read-only")
        contiguous = interface.get("strides") is None
        found = math.prod(interface["shape"]) * np.dtype(interface["typestr"]).itemsize
    else:
        raise ValueError(f"{type(memory).__name__} is no device memory: give an address, a tensor or a CUDA array")
    if not contiguous:
        raise ValueError("the device memory is not contiguous")
    if found != count:
        raise ValueError(f"the device memory has {found} bytes, the NumPy array {count}")
    return address

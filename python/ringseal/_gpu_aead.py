"""AES-GCM and GMAC on device memory."""

from __future__ import annotations

import ctypes
from enum import IntEnum

from . import _library
from ._library import call


class Verdict(IntEnum):
    """What :meth:`GpuAead.open_at` and :meth:`GpuAead.verify_gmac_at` write to device memory."""

    #: Not known: the stream is not there yet, or the work failed to run. Never take it for a success.
    PENDING = 0
    #: The tag is right.
    VERIFIED = 1
    #: The tag is wrong. The plaintext is zeros.
    FORGED = 2


class GpuAead:
    """AES-GCM under one key of 16, 24 or 32 bytes on one GPU, for messages in its memory.

    Addresses are integers, such as ``tensor.data_ptr()`` or ``array.data.ptr``, and so are streams, such as
    ``torch.cuda.current_stream().cuda_stream``. Nothing waits for the GPU: what is queued on a stream is done when the
    stream has passed it, and until then all memory must stay as it is. A tag has 16 bytes and, as a verdict, an address
    that is a multiple of 4; texts may lie anywhere, in place or apart. Any number of threads may use a key at once.

    Never use a nonce twice with one key: that gives away both messages and lets anyone forge. A stream that is being
    captured is refused, because a graph would.
    """

    def __init__(self, key: bytes, device: int = 0) -> None:
        """Expands ``key`` on the GPU that CUDA numbers ``device``, and loads the kernels: keep the object.

        Raises :class:`ringseal.UnsupportedError` without a usable GPU of compute capability 8.0.
        """
        self._handle = ctypes.c_void_p()
        call("ringseal_gpu_aead_create", bytes(memoryview(key)), len(key), device, ctypes.byref(self._handle))

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            _library.destroy("ringseal_gpu_aead_destroy", handle)

    def seal_at(
        self, nonce: bytes, source: int, target: int, count: int, tag: int, stream: int, *, aad: int = 0, aad_bytes: int = 0
    ) -> None:
        """Queues the encryption of ``count`` bytes from ``source`` to ``target``; the tag goes to ``tag``.

        After an exception don't use them, nor the nonce again.
        """
        call(
            "ringseal_gpu_seal", self._handle, nonce, len(nonce), aad, aad_bytes, source, target, count, tag, stream
        )

    def open_at(
        self,
        nonce: bytes,
        source: int,
        target: int,
        count: int,
        tag: int,
        verdict: int,
        stream: int,
        *,
        aad: int = 0,
        aad_bytes: int = 0,
    ) -> None:
        """Queues the verification and decryption of ``count`` bytes from ``source`` to ``target``.

        No exception says that the tag is wrong: when the stream has passed the work, the 32-bit word at ``verdict`` is a
        :class:`Verdict`. Until then ``target`` may hold plaintext that is not verified, which nothing may read; after
        :attr:`Verdict.FORGED` it is zeros, and so is the ciphertext if the call was in place. Work that is queued behind
        this runs whatever the verdict.
        """
        call(
            "ringseal_gpu_open",
            self._handle, nonce, len(nonce), aad, aad_bytes, source, target, count, tag, verdict, stream,
        )

    def gmac_at(self, nonce: bytes, aad: int, aad_bytes: int, tag: int, stream: int) -> None:
        """Queues the GMAC of ``aad_bytes`` bytes at ``aad``; it goes to ``tag``."""
        call("ringseal_gpu_gmac", self._handle, nonce, len(nonce), aad, aad_bytes, tag, stream)

    def verify_gmac_at(
        self, nonce: bytes, aad: int, aad_bytes: int, tag: int, verdict: int, stream: int
    ) -> None:
        """Queues the verification of a GMAC; the word at ``verdict`` becomes a :class:`Verdict`, as in :meth:`open_at`."""
        call("ringseal_gpu_gmac_verify", self._handle, nonce, len(nonce), aad, aad_bytes, tag, verdict, stream)

"""AES-GCM and GMAC."""

from __future__ import annotations

import ctypes

from . import _library
from ._library import TAG_BYTES, call


class Aead:
    """AES-GCM under one key of 16, 24 or 32 bytes. Any number of threads may use one at once.

    Never use a nonce twice with one key: that gives away both messages and lets anyone forge.
    """

    def __init__(self, key: bytes, backend: str = "cpu") -> None:
        """Expands ``key``. ``backend`` is "cpu", "cuda", "emulated" or "auto"."""
        self._handle = ctypes.c_void_p()
        call("ringseal_aead_create", bytes(memoryview(key)), len(key), backend.encode(), ctypes.byref(self._handle))

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            _library.destroy("ringseal_aead_destroy", self._handle)

    def seal(self, nonce: bytes, data: bytes, aad: bytes = b"") -> tuple[bytes, bytes]:
        """Encrypts ``data``: its ciphertext, of the same length, and the 16-byte tag."""
        data = bytes(memoryview(data))
        out, tag = ctypes.create_string_buffer(max(len(data), 1)), ctypes.create_string_buffer(TAG_BYTES)
        call("ringseal_seal", self._handle, nonce, len(nonce), aad, len(aad), data, out, len(data), tag)
        return out.raw[: len(data)], tag.raw

    def open(self, nonce: bytes, data: bytes, tag: bytes, aad: bytes = b"") -> bytes:
        """Verifies and decrypts ``data``.

        Raises :class:`ringseal.AuthenticationError` if the tag does not verify.
        """
        data = bytes(memoryview(data))
        out = ctypes.create_string_buffer(max(len(data), 1))
        call(
            "ringseal_open", self._handle, nonce, len(nonce), aad, len(aad), data, out, len(data), tag, len(tag)
        )
        return out.raw[: len(data)]

    def gmac(self, nonce: bytes, aad: bytes) -> bytes:
        """The 16-byte GMAC of ``aad``."""
        tag = ctypes.create_string_buffer(TAG_BYTES)
        call("ringseal_gmac", self._handle, nonce, len(nonce), aad, len(aad), tag)
        return tag.raw

    def verify_gmac(self, nonce: bytes, aad: bytes, tag: bytes) -> None:
        """Raises :class:`ringseal.AuthenticationError` if ``tag`` is not the GMAC of ``aad``."""
        call("ringseal_gmac_verify", self._handle, nonce, len(nonce), aad, len(aad), tag, len(tag))

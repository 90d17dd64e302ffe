"""The shared library: loading it, declaring its functions, turning statuses into exceptions."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_bool, c_char_p, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

ABI_VERSION = 1
TAG_BYTES = 16
SECRET_BYTES = 32


class Error(Exception):
    """What went wrong, and what to do about it. ``status`` is the library's number for it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[type[Error], tuple[str, int]]:
        return type(self), (str(self), self.status)


class AuthenticationError(Error):
    """A tag did not verify: the data were changed, or key, nonce or additional data are others."""


class DeadlineError(Error):
    """A rank did not deliver in time."""


class AbortedError(Error):
    """Another rank failed first."""


class HandshakeError(Error):
    """The ranks did not come to a session."""


class PoisonedError(Error):
    """The communicator failed before and carries no data until it is rekeyed."""


class LostError(Error):
    """A rank's process ended, or the connection to it. Make a new group."""


class UnsupportedError(Error):
    """The library or the machine can't do that."""


class InvalidArgumentError(Error, ValueError):
    """An argument is out of its domain or doesn't fit the others."""


_ERRORS = {
    1: AuthenticationError,
    2: DeadlineError,
    3: AbortedError,
    4: HandshakeError,
    5: PoisonedError,
    6: InvalidArgumentError,
    7: InvalidArgumentError,
    9: UnsupportedError,
    10: UnsupportedError,
    16: LostError,
}


class Options(ctypes.Structure):
    """``ringseal_options``."""

    _fields_ = [
        ("struct_bytes", c_size_t),
        ("protection", c_uint32),
        ("schedule", c_uint32),
        ("backend", c_char_p),
        ("record_bytes", c_size_t),
        ("timeout_ms", c_uint64),
        ("key_bytes", c_uint64),
        ("host", c_char_p),
        ("keystream_collectives", c_size_t),
        ("keystream_bytes", c_size_t),
        ("keystream_makers", c_size_t),
        ("transport", c_uint32),
        ("node_ranks", c_size_t),
        ("sm_budget", c_size_t),
    ]


class CopyOptions(ctypes.Structure):
    """``ringseal_copy_options``."""

    _fields_ = [
        ("struct_bytes", c_size_t),
        ("protection", c_uint32),
        ("record_bytes", c_size_t),
        ("piece_records", c_size_t),
        ("slots", c_size_t),
        ("threads", c_size_t),
        ("key_bytes", c_uint64),
    ]


GATHER = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_size_t, c_void_p, c_uint64)

# Name: argument types. All return a status.
_FUNCTIONS = {
    "ringseal_aead_create": [c_char_p, c_size_t, c_char_p, POINTER(c_void_p)],
    "ringseal_seal": [c_void_p, c_char_p, c_size_t, c_char_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p],
    "ringseal_open": [
        c_void_p, c_char_p, c_size_t, c_char_p, c_size_t, c_void_p, c_void_p, c_size_t, c_char_p, c_size_t,
    ],
    "ringseal_gmac": [c_void_p, c_char_p, c_size_t, c_char_p, c_size_t, c_void_p],
    "ringseal_gmac_verify": [c_void_p, c_char_p, c_size_t, c_char_p, c_size_t, c_char_p, c_size_t],
    "ringseal_gpu_aead_create": [c_char_p, c_size_t, c_size_t, POINTER(c_void_p)],
    "ringseal_gpu_seal": [
        c_void_p, c_char_p, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p,
    ],
    "ringseal_gpu_open": [
        c_void_p, c_char_p, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_void_p,
    ],
    "ringseal_gpu_gmac": [c_void_p, c_char_p, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p],
    "ringseal_gpu_gmac_verify": [c_void_p, c_char_p, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p, c_void_p],
    "ringseal_gpu_copy_create": [c_char_p, c_size_t, POINTER(CopyOptions), POINTER(c_void_p)],
    "ringseal_gpu_copy_to_device": [c_void_p, c_void_p, c_void_p, c_size_t, c_void_p],
    "ringseal_gpu_copy_to_host": [c_void_p, c_void_p, c_void_p, c_size_t, c_void_p],
    "ringseal_gpu_copy_rekey": [c_void_p, c_char_p],
    "ringseal_gpu_copy_poisoned": [c_void_p, POINTER(c_bool)],
    "ringseal_communicator_create_group": [c_char_p, c_size_t, POINTER(Options), POINTER(c_void_p)],
    "ringseal_communicator_create": [
        c_char_p, c_size_t, c_size_t, POINTER(Options), GATHER, c_void_p, POINTER(c_void_p),
    ],
    "ringseal_communicator_create_rendezvous": [
        c_char_p, c_size_t, c_size_t, POINTER(Options), c_char_p, POINTER(c_void_p),
    ],
    "ringseal_gpu_communicator_create": [
        c_char_p, c_size_t, c_size_t, c_size_t, c_size_t, POINTER(Options), GATHER, c_void_p, POINTER(c_void_p),
    ],
    "ringseal_gpu_communicator_close": [c_void_p],
    "ringseal_gpu_communicator_rekey": [c_void_p],
    "ringseal_gpu_communicator_poisoned": [c_void_p, POINTER(c_bool)],
    "ringseal_gpu_all_reduce": [c_void_p, c_void_p, c_void_p, c_size_t, c_uint32, c_uint32, c_void_p],
    "ringseal_gpu_reduce_scatter": [c_void_p, c_void_p, c_void_p, c_size_t, c_uint32, c_uint32, c_void_p],
    "ringseal_gpu_all_gather": [c_void_p, c_void_p, c_void_p, c_size_t, c_uint32, c_void_p],
    "ringseal_gpu_broadcast": [c_void_p, c_void_p, c_void_p, c_size_t, c_uint32, c_size_t, c_void_p],
    "ringseal_gpu_make_keystream": [c_void_p, POINTER(c_size_t), c_size_t, POINTER(c_size_t)],
    "ringseal_gpu_wait_for_keystream": [c_void_p],
    "ringseal_gpu_keystream_misses": [c_void_p, POINTER(c_uint32)],
    "ringseal_gpu_outcome": [c_void_p],
    "ringseal_communicator_info": [c_void_p, POINTER(c_size_t), POINTER(c_size_t), POINTER(c_bool)],
    "ringseal_communicator_set_timeout": [c_void_p, c_uint64],
    "ringseal_communicator_rekey": [c_void_p],
    "ringseal_chunk": [c_size_t, c_size_t, c_size_t, POINTER(c_size_t), POINTER(c_size_t)],
    "ringseal_all_reduce": [c_void_p, c_void_p, c_void_p, c_size_t, c_uint32, c_uint32],
    "ringseal_reduce_scatter": [c_void_p, c_void_p, c_void_p, c_size_t, c_uint32, c_uint32],
    "ringseal_all_gather": [c_void_p, c_void_p, c_void_p, c_size_t, c_uint32],
    "ringseal_broadcast": [c_void_p, c_void_p, c_void_p, c_size_t, c_uint32, c_size_t],
}


def _load() -> ctypes.CDLL:
    given = os.environ.get("RINGSEAL_LIBRARY")
    path = Path(given) if given else Path(__file__).with_name("libringseal_c.so")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(
            f"{path} can't be loaded ({error}); install a wheel made by scripts/build-wheel, or say by the "
            "environment variable RINGSEAL_LIBRARY where libringseal_c.so is"
        ) from error
    library.ringseal_abi_version.restype = c_uint32
    found = library.ringseal_abi_version()
    if found != ABI_VERSION:
        raise ImportError(f"{path} has interface version {found}; this package needs {ABI_VERSION}")
    for name in ("ringseal_version", "ringseal_last_error"):
        getattr(library, name).restype = c_char_p
    library.ringseal_keystream_pays.restype = c_bool
    library.ringseal_keystream_pays.argtypes = [c_size_t, c_size_t]
    for kind in ("aead", "gpu_aead", "gpu_copy", "communicator", "gpu_communicator"):
        function = getattr(library, f"ringseal_{kind}_destroy")
        function.restype, function.argtypes = None, [c_void_p]
    for name, argtypes in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = c_int32, argtypes
    return library


_library = _load()


def call(name: str, *arguments: object) -> None:
    """Calls a function and raises what its status means. Other Python threads run meanwhile."""
    status = getattr(_library, name)(*arguments)
    if status != 0:
        message = _library.ringseal_last_error().decode()
        raise _ERRORS.get(status, Error)(message, status)


def destroy(name: str, handle: c_void_p) -> None:
    """Frees a handle."""
    getattr(_library, name)(handle)


def keystream_pays(sm_budget: int, multiprocessors: int) -> bool:
    """``ringseal_keystream_pays``; a budget of 0 is all multiprocessors."""
    return _library.ringseal_keystream_pays(sm_budget, multiprocessors)


def version() -> str:
    """The library's version."""
    return _library.ringseal_version().decode()

"""Sealed collectives: every byte that leaves a rank is sealed with AES-GCM.

* :class:`Aead`: AES-GCM and GMAC.
* :class:`GpuAead`: the same on device memory, in the order of a CUDA stream.
* :class:`GpuCopy`: sealed copies between NumPy arrays and device memory.
* :class:`Communicator`: all-reduce, reduce-scatter, all-gather and broadcast of NumPy arrays over ranks that are threads
  (:meth:`Communicator.group`) or processes (:meth:`Communicator.join`).
* :class:`GpuCommunicator`: the same collectives on device memory, over ranks that are processes.
* :mod:`ringseal.ddp`: gradient hooks for PyTorch's DistributedDataParallel.

>>> import ringseal
>>> aead = ringseal.Aead(bytes(32))
>>> sealed, tag = aead.seal(nonce=bytes(12), data=b"a gradient")
>>> aead.open(nonce=bytes(12), data=sealed, tag=tag)
b'a gradient'
"""

from ._aead import Aead
from ._communicator import Communicator, Gather, GpuCommunicator, KeystreamAhead
from ._gpu_aead import GpuAead, Verdict
from ._gpu_copy import GpuCopy
from ._library import (
    AbortedError,
    AuthenticationError,
    DeadlineError,
    Error,
    HandshakeError,
    LostError,
    PoisonedError,
    UnsupportedError,
    version,
)

__all__ = [
    "AbortedError",
    "Aead",
    "AuthenticationError",
    "Communicator",
    "DeadlineError",
    "Error",
    "Gather",
    "GpuAead",
    "GpuCommunicator",
    "GpuCopy",
    "HandshakeError",
    "KeystreamAhead",
    "LostError",
    "PoisonedError",
    "UnsupportedError",
    "Verdict",
    "version",
]
__version__ = version()

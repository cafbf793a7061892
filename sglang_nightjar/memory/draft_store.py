"""The draft's weights: on the device while it is resident, and always in a host mirror.

Weights never change while serving, so the mirror is made once: evicting copies nothing, and
reloading is one copy, in chunks, verified by checksum. The tensors lie on an arena and keep their
addresses, so whatever holds a pointer to one stays right. On the CPU the mirror is an unlinked
file: its pages are not this process's memory.
"""

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang_nightjar.memory.arena import Arena

_ALIGNMENT = 64  # bytes: a cache line, and what SIMD kernels like


class MirrorError(Exception):
    """The host mirror cannot be read, or does not hold what was written; the draft must not be used."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A tensor of the draft and where on the arena it lies."""

    tensor: torch.Tensor
    start: int


class DraftStore:
    """Moves a loaded model onto an arena, and its weights between that and the mirror.

    Attributes:
        nbytes: bytes the weights take on the device, with alignment and what modules derive from them.
        checksum: BLAKE2b of them.
    """

    def __init__(
        self, model: torch.nn.Module, make_arena: Callable[[int], Arena], *, shared_with: torch.nn.Module, folder: Path
    ) -> None:
        """Moves every parameter and buffer of `model` that is not also one of `shared_with`.

        Modules whose `quant_method` derives something from the weights are told: `weights_moved(module)` now and
        after every reload, `weights_gone(module)` at every eviction; `derived_bytes(module)` is what it takes.

        Args:
            make_arena: reserves at least so many bytes of device address space.
            folder: on disk, where the mirror is kept.
        """
        self._model = model
        kept = {tensor.untyped_storage().data_ptr() for tensor in _tensors(shared_with)}
        moving = [t for t in _tensors(model) if t.numel() and t.untyped_storage().data_ptr() not in kept]
        placed, end = [], 0
        for tensor in moving:
            placed.append(_Placed(tensor, end))
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        self._arena = make_arena(end)
        self._size = self._arena.size
        self._arena.commit(0, self._size)
        self._bytes = self._arena.tensor(0, (self._size,), torch.uint8)
        for place in placed:
            view = self._arena.tensor(place.start, place.tensor.shape, place.tensor.dtype)
            view.copy_(place.tensor)
            with torch.no_grad():
                place.tensor.set_(view)
        for tell in self._listeners("weights_moved"):
            tell()
        self.nbytes = self._size + sum(nbytes() for nbytes in self._listeners("derived_bytes"))
        self._file = tempfile.TemporaryFile(prefix="nightjar-draft-", dir=folder)  # noqa: SIM115  # kept open
        self._file.write(memoryview(self._bytes.numpy()))
        self._file.flush()
        self.checksum = self._digest()

    @property
    def resident(self) -> bool:
        """Whether there is device memory under the weights."""
        return self._arena.committed > 0

    def release(self) -> None:
        """Gives the device memory back; touching a weight is a fault from now on."""
        self._forget()

    def reload(self, chunk_bytes: int, before_chunk: Callable[[], None]) -> None:
        """Takes device memory and copies the weights back; meant for a thread of its own.

        Args:
            before_chunk: called before every `chunk_bytes`, and before each module derives something anew: it waits
                until that may be done, or raises.
        Raises:
            CommitError: there is no memory; nothing has changed.
            MirrorError: the mirror is broken; the memory is given back.
        """
        self._arena.commit(0, self._size)
        try:
            digest = hashlib.blake2b()
            target = memoryview(self._bytes.numpy())
            for start in range(0, self._size, chunk_bytes):
                before_chunk()
                chunk = target[start : start + chunk_bytes]
                self._read(chunk, start)
                digest.update(chunk)
            if digest.hexdigest() != self.checksum:
                raise MirrorError(
                    f"the draft's weights read back as {digest.hexdigest()[:12]}, not {self.checksum[:12]}"
                )
            for tell in self._listeners("weights_moved"):
                before_chunk()
                tell()
        except BaseException:
            self._forget()
            raise

    def verify(self) -> None:
        """Raises `MirrorError` where the weights on the device are not those that were loaded."""
        found = self._digest()
        if found != self.checksum:
            raise MirrorError(f"the draft's weights are {found[:12]}, not {self.checksum[:12]}")

    def intact(self) -> str | None:
        """Why the mirror could not be read back, as far as a look at its size tells; None where it could."""
        size = os.fstat(self._file.fileno()).st_size
        return None if size == self._size else f"the mirror of the draft has {size} bytes, not {self._size}"

    def _read(self, chunk: memoryview, start: int) -> None:
        done = 0
        while done < len(chunk):
            count = os.preadv(self._file.fileno(), [chunk[done:]], start + done)
            if count == 0:
                raise MirrorError(f"the mirror of the draft ends at {start + done} of {self._size} bytes")
            done += count

    def _digest(self) -> str:
        return hashlib.blake2b(memoryview(self._bytes.numpy())).hexdigest()

    def _forget(self) -> None:
        for tell in self._listeners("weights_gone"):
            tell()
        _return_freed_memory()
        self._arena.decommit(0, self._size)

    def _listeners(self, event: str) -> list[Callable[[], Any]]:
        """What to call about `event`: one function per module that wants to know."""
        found: list[Callable[[], Any]] = []
        for module in self._model.modules():
            listener = getattr(getattr(module, "quant_method", None), event, None)
            if listener is not None:
                found.append(partial(listener, module))
        return found


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers, each once."""
    yield from model.parameters()
    yield from model.buffers()


def _return_freed_memory() -> None:
    """What modules freed goes back to the system at once where the C library can: it is counted as free."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

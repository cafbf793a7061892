"""The draft's weights: on the device while it is resident, and always in a host mirror.

Weights never change while serving, so the mirror is made once: evicting copies nothing, and
reloading is one copy, in chunks, verified by checksum. The tensors lie on an arena and keep their
addresses, so whatever holds a pointer to one (a captured CUDA graph, too) stays right.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sglang_nightjar.memory.device import DeviceMemory
from sglang_nightjar.memory.mirror import MirrorError

_ALIGNMENT = 64  # bytes: a cache line, and what SIMD kernels like; on a GPU, four of its widest accesses


@dataclass(frozen=True, slots=True)
class _Placed:
    """A tensor of the draft and where on the arena it lies."""

    tensor: torch.Tensor
    start: int


class DraftStore:
    """Moves a loaded model onto an arena, and its weights between that and the mirror.

    Attributes:
        nbytes: bytes the weights take on the device, with alignment and what modules derive from them.
        checksum: of them, as the mirror computes it.
        device: that they are on.
        mirror: them on the host.
    """

    def __init__(self, model: torch.nn.Module, device: DeviceMemory, *, shared_with: torch.nn.Module) -> None:
        """Moves every parameter and buffer of `model` that is not also one of `shared_with`.

        Modules whose `quant_method` derives something from the weights are told: `weights_moved(module)` now and
        after every reload, `weights_gone(module)` at every eviction; `derived_bytes(module)` is what it takes.

        Raises:
            CommitError, UserError: the device or the host has no room.
        """
        self._model = model
        self.device = device
        kept = {tensor.untyped_storage().data_ptr() for tensor in _tensors(shared_with)}
        moving = [t for t in _tensors(model) if t.numel() and t.untyped_storage().data_ptr() not in kept]
        placed, end = [], 0
        for tensor in moving:
            placed.append(_Placed(tensor, end))
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        self._arena = device.arena(end)
        self._size = self._arena.size
        self._arena.commit(0, self._size)
        for place in placed:
            view = self._arena.tensor(place.start, place.tensor.shape, place.tensor.dtype)
            view.copy_(place.tensor)
            with torch.no_grad():
                place.tensor.set_(view)
        self._tell("weights_moved")
        device.release_unused()  # where the weights were before
        self.nbytes = self._size + sum(self._tell("derived_bytes"))
        self.mirror = device.mirror(self._arena.tensor(0, (self._size,), torch.uint8))
        self.checksum = self.mirror.digest()

    @property
    def resident(self) -> bool:
        """Whether there is device memory under the weights."""
        return self._arena.committed > 0

    @property
    def copied(self) -> int:
        """Bytes of weights copied from the mirror so far, in all reloads together."""
        return self.mirror.copied

    def release(self) -> None:
        """Gives the device memory back; touching a weight is a fault from now on.

        Raises:
            CommitError, MirrorError: it could not be taken away: it is still there, but the draft must not be used
                before a `reload`. `release` can be tried again.
        """
        if self._tell("weights_gone"):
            self.device.release_unused()
        self.mirror.settle()
        self._arena.decommit(0, self._size)

    def reload(self, chunk_bytes: int, before_chunk: Callable[[], None]) -> None:
        """Takes device memory and copies the weights back; meant for a thread of its own.

        Args:
            before_chunk: called before every `chunk_bytes`, and again before modules with that much between them
                derive something anew: it waits until that may be done, or raises.
        Raises:
            CommitError: there is no memory; nothing has changed.
            MirrorError: the mirror is broken; the memory is given back. Where even that fails, `resident` says so.
        """
        if self.resident:  # since a release was refused; steps from before that may still read the weights
            self.device.wait()
        else:
            self._arena.commit(0, self._size)
        try:
            self._compare(self.mirror.restore(chunk_bytes, before_chunk), "read back as")
            left = 0
            for module, listener in self._listeners("weights_moved"):
                size = sum(tensor.nbytes for tensor in _tensors(module))
                if size > left:
                    before_chunk()
                    left = chunk_bytes
                left -= size
                listener(module)
        except BaseException:
            self.release()
            raise

    def verify(self) -> None:
        """Raises `MirrorError` where the weights on the device are not those that were loaded."""
        self._compare(self.mirror.digest(), "are")

    def intact(self) -> str | None:
        """Why a reload would fail, as far as the mirror can tell without copying; None where nothing says so."""
        return self.mirror.intact()

    def _compare(self, found: str, how: str) -> None:
        if found != self.checksum:
            raise MirrorError(f"the draft's weights {how} {found[:12]}, not {self.checksum[:12]}")

    def _tell(self, event: str) -> list[Any]:
        """What the modules that want to know about `event` answer."""
        return [listener(module) for module, listener in self._listeners(event)]

    def _listeners(self, event: str) -> list[tuple[torch.nn.Module, Callable[[torch.nn.Module], Any]]]:
        """The modules that want to know about `event`, and what to call with each."""
        found = []
        for module in self._model.modules():
            listener = getattr(getattr(module, "quant_method", None), event, None)
            if listener is not None:
                found.append((module, listener))
        return found


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers, each once."""
    yield from model.parameters()
    yield from model.buffers()

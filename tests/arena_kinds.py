"""Test support: the same suite over host memory and over the fake CUDA device."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cuda_world import device_on
from fake_cuda import FakeCuda

from sglang_nightjar.memory.device import DeviceMemory, PosixDevice


@dataclass
class Place:
    """A device. `cuda`: the driver under it, where it is the fake CUDA device. `end`: ends that at once."""

    memory: DeviceMemory
    cuda: FakeCuda | None = None
    end: Callable[[], object] = lambda: None

    def fill(self) -> None:
        """From now on nobody gets memory but what this process's own arenas give up; on CUDA, by handing it over."""
        if self.cuda is not None:
            self.cuda.memory = self.cuda.used

    def check_handed_over(self) -> None:
        """Since `fill`, no handle was made and none given back to the device."""
        if self.cuda is not None:
            assert self.cuda.used == self.cuda.memory
            assert "cuMemRelease" not in self.cuda.calls


class Kind:
    """`posix` or `cuda`. `broken`: rules of CUDA that were broken on devices that have ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.broken: list[str] = []

    def place(self, owner: object, folder: Path | None = None) -> Place:
        """A new device, which ends when `owner` does. `folder`: for mirrors on the host's."""
        if self.name == "posix":
            return Place(PosixDevice(folder))
        cuda = FakeCuda()
        return Place(device_on(cuda), cuda, weakref.finalize(owner, self._end, cuda))

    def _end(self, cuda: FakeCuda) -> None:
        self.broken += cuda.violations
        cuda.close()

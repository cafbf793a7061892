"""A CUDA device: arenas over its virtual memory, mirrors in pinned memory, one fence for all that is taken away."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_nightjar.memory.arena import Arena
from sglang_nightjar.memory.arena_cuda import HandlePool, cuda_arena
from sglang_nightjar.memory.cuda_driver import CudaDriver
from sglang_nightjar.memory.cuda_tensors import CudaTensors, Tensors
from sglang_nightjar.memory.fence_cuda import StreamFence
from sglang_nightjar.memory.mirror import Mirror
from sglang_nightjar.memory.mirror_cuda import PinnedMirror


class CudaDevice:
    """`DeviceMemory` of one GPU.

    Args:
        ordinal: of the device, as CUDA counts.
        streams: the driver's names of all streams whose work uses weights or KV; None: the one that is current
            where `mark` is called. With SGLang's overlap scheduling it is the forward stream.
        bindings, tensors: for tests; a GPU's by default.

    Attributes:
        pool: where its arenas take memory from and give it to.

    Raises:
        DriverError: no such device, or one without virtual memory management.
    """

    def __init__(
        self,
        ordinal: int,
        *,
        streams: Callable[[], Sequence[Any]] | None = None,
        bindings: Any = None,
        tensors: Tensors | None = None,
    ) -> None:
        self._driver = CudaDriver(ordinal, bindings)
        self._tensors = CudaTensors(ordinal) if tensors is None else tensors
        self.pool = HandlePool(self._driver, self._tensors)
        self.granularity = self.pool.granularity
        self._fence = StreamFence(self._driver, streams or (lambda: [self._tensors.current_stream()]))

    def arena(self, nbytes: int) -> Arena:
        return cuda_arena(nbytes, self.pool, self._fence.wait)

    def mirror(self, contents: torch.Tensor) -> Mirror:
        return PinnedMirror(self._driver, self._tensors, contents, self.granularity)

    def mark(self) -> None:
        self._fence.mark()

    def wait(self) -> None:
        self._fence.wait()

    def release_unused(self) -> None:
        self._tensors.release_cached()

"""K and V buffers that grow and shrink in place: SGLang's pool on an arena.

The buffers have addresses for the largest pool from the start; only the first rows have memory.
Upstream seam: `SRTPlatform.get_kv_pool_cls`, `MHATokenToKVPool._create_buffers_normal`.
"""

from typing import Any, ClassVar

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_nightjar.memory.arena import Regions
from sglang_nightjar.memory.device import DeviceMemory, PosixDevice
from sglang_nightjar.platform.kv_pool import CpuKVPool


class ElasticBuffers(MHATokenToKVPool):  # type: ignore[misc]
    """A pool of `size` slots that `resize` changes; slot numbers and addresses stay what they are.

    Attributes:
        spare: bytes of other memory that this pool may take over one day: so many, and so many per slot it begins with.
        memory: the device its buffers are on.
        regions: its buffers, all K and then all V; a row is a slot, and there is one page more than slots.
    """

    spare = (0, 0)
    memory: ClassVar[DeviceMemory]
    regions: Regions

    @classmethod
    def with_spare(cls, fixed: int, per_slot: int, memory: DeviceMemory | None = None) -> type["ElasticBuffers"]:
        """The class SGLang is to make pools of, which it gives no arguments of ours; on its own memory by default."""
        return type(cls.__name__, (cls,), {"spare": (fixed, per_slot), "memory": memory or cls.memory})

    def _create_buffers_normal(self) -> None:
        (k_shape, v_shape), count = self._kv_buffer_shapes(), 2 * self.layer_num
        assert k_shape == v_shape, f"K rows {k_shape} and V rows {v_shape} differ"
        rows, tail = k_shape[0], k_shape[1:]
        row_bytes = int(torch.Size(tail).numel()) * self.store_dtype.itemsize
        fixed, per_slot = self.spare
        # Whatever rounding up to the granularity has added, here and in the memory to be taken over, is used too.
        unit = self.memory.granularity
        rounding = 2 * -(-unit // row_bytes)
        rows_max = rows + -(-(fixed + per_slot * rows) // (count * row_bytes)) + rounding
        rows_max = -(-rows_max // self.page_size) * self.page_size  # attention backends view buffers as pages
        arena = self.memory.arena(Regions.reserved_bytes(count, rows_max, row_bytes, unit))
        self.regions = Regions(arena, count, rows_max, row_bytes)
        self.regions.resize(rows)
        buffers = [self.regions.tensor(index, tail, self.store_dtype) for index in range(count)]
        self.k_buffer, self.v_buffer = buffers[: self.layer_num], buffers[self.layer_num :]

    def _build_kv_buffer_descs(self) -> Any:
        """Of the pool as it begins: upstream checks that buffers have as many rows as slots."""
        buffers = self.k_buffer, self.v_buffer
        self.k_buffer, self.v_buffer = [], []  # it goes by `_kv_buffer_shapes` then
        try:
            return super()._build_kv_buffer_descs()
        finally:
            self.k_buffer, self.v_buffer = buffers

    @property
    def nbytes(self) -> int:
        """Bytes of device memory under the buffers."""
        return self.regions.bytes_for(self.regions.committed_rows)

    def bytes_for(self, slots: int) -> int:
        """Bytes of device memory under the buffers of `slots` slots (and the page of slot 0), or of none."""
        return self.regions.bytes_for(self._rows(slots))

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of K and of V, for upstream's log."""
        return self.nbytes // 2, self.nbytes // 2

    def slots_for(self, budget_bytes: int) -> int:
        """Most slots, in whole pages, whose buffers fit `budget_bytes`."""
        rows = self.regions.rows_for(budget_bytes)
        return int((rows - self.page_size) // self.page_size * self.page_size)

    def resize(self, slots: int) -> None:
        """Puts memory under `slots` slots and the page of slot 0, or under none at all (`slots` = 0).

        `CommitError` where the device refuses; nothing has changed then. Any thread may call it.
        """
        self.regions.resize(self._rows(slots))

    def resized(self, slots: int) -> None:
        """The pool has `slots` slots from now on, as far as upstream asks."""
        self.size = slots
        self.mem_usage = self.nbytes / 2**30

    def _rows(self, slots: int) -> int:
        return slots + self.page_size if slots else 0


class ElasticKVPool(ElasticBuffers, CpuKVPool):
    """On host memory, as on the CPU platform."""

    memory: ClassVar[DeviceMemory] = PosixDevice()

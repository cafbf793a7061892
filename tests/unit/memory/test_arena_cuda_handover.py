"""Memory that goes from the draft's arena to the KV buffers' and back, with every call refused in turn."""

import ctypes
from collections.abc import Callable
from contextlib import closing

import torch
from cuda_world import arena_on, pool_on
from fake_cuda import FakeCuda

from sglang_nightjar.kernels.kv_relocate import kv_relocate
from sglang_nightjar.memory.arena import CommitError, Regions


def test_memory_is_handed_over_without_ever_being_free(cuda: FakeCuda) -> None:
    """Another process takes whatever is free at any time; the other arena gets the handles all the same."""
    pool = pool_on(cuda)
    draft, target = arena_on(pool), arena_on(pool)
    unit = pool.granularity
    target.commit(0, unit)
    kept = target.tensor(0, (unit,), torch.uint8).fill_(7)
    draft.commit(0, 4 * unit)
    cuda.memory = cuda.used
    handles = set(cuda.held)
    in_draft, in_target = (draft, (0, 4 * unit)), (target, (unit, 5 * unit))
    for (giver, old), (taker, new) in [(in_draft, in_target), (in_target, in_draft)] * 3:
        giver.tensor(old[0], (4 * unit,), torch.uint8).fill_(9)
        giver.decommit(*old)
        assert pool.spare == 4 * unit and cuda.used == cuda.memory
        taker.commit(*new)
        assert pool.spare == 0 and set(cuda.held) == handles
        assert not taker.tensor(new[0], (4 * unit,), torch.uint8).any()
    assert (kept == 7).all()
    assert cuda.calls.count("cuMemCreate") == 5 and "cuMemRelease" not in cuda.calls


def test_addresses_hold_over_evictions(cuda: FakeCuda) -> None:
    """A raw address, as a captured graph holds it, names the same row after memory went and came back."""
    pool = pool_on(cuda)
    arena = arena_on(pool, units=8)
    regions = Regions(arena, 2, 4 * pool.granularity // 64, 64)
    regions.resize(100)
    buffers = [regions.tensor(index, (16,), torch.float32) for index in range(2)]
    captured = [buffer[3].data_ptr() for buffer in buffers]
    for round_ in range(3):
        regions.resize(regions.rows_for(arena.size))
        regions.resize(0)
        regions.resize(100)
        assert [regions.tensor(index, (16,), torch.float32)[3].data_ptr() for index in range(2)] == captured
        for index, buffer in enumerate(buffers):
            assert not buffer[3].any()
            buffer[3] = round_ + index
            assert ctypes.c_float.from_address(captured[index]).value == round_ + index


class World:
    """A draft's weights, its KV and the target's on one device that is full; `evict` and `reload` as a rank does."""

    ROW = 64

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.pool = pool_on(cuda)
        self.unit = self.pool.granularity
        self.weights = arena_on(self.pool, units=3)
        self.rows = 2 * self.unit // self.ROW
        self.draft = Regions(arena_on(self.pool, units=4), 2, self.rows, self.ROW)
        self.target_arena = arena_on(self.pool, units=20)
        self.target = Regions(self.target_arena, 4, 5 * self.unit // self.ROW, self.ROW)
        self.weights.commit(0, 3 * self.unit)
        self.draft.resize(self.rows)
        self.target.resize(self.rows)
        self.buffers = [self.target.tensor(index, (self.ROW,), torch.uint8) for index in range(4)]
        cuda.memory = cuda.used

    def script(self) -> list[Callable[[], None]]:
        """Evict, reload, evict, as steps of which each may be refused and tried again."""
        evict = [
            lambda: self.weights.decommit(0, 3 * self.unit),
            lambda: self.draft.resize(0),
            lambda: self.target.resize(3 * self.unit // self.ROW),
        ]
        reload = [
            lambda: self.target.resize(self.rows),
            lambda: self.draft.resize(self.rows),
            lambda: self.weights.commit(0, 3 * self.unit),
        ]
        return [*evict, *reload, *evict]

    def sizes(self) -> tuple[int, ...]:
        return self.weights.committed, self.draft.committed_rows, self.target.committed_rows, len(self.cuda.mappings)

    def check(self) -> None:
        mapped = self.weights.committed + self.draft.bytes_for(self.draft.committed_rows) + self.target_arena.committed
        assert len(self.cuda.mappings) == len(self.cuda.accessible) == mapped // self.unit
        assert self.cuda.used == self.cuda.memory == mapped + self.pool.spare
        assert len({handle for _, handle in self.cuda.mappings.values()}) == len(self.cuda.mappings)
        assert not self.cuda.violations


def test_evict_reload_evict_with_every_call_refused_in_turn() -> None:
    """Whichever driver call fails, its step leaves sizes and contents, and succeeds when tried again."""

    def run(refuse: int | None) -> int:
        cuda = FakeCuda()
        with closing(cuda):
            world = World(cuda)
            for index, buffer in enumerate(world.buffers):
                buffer[: world.rows] = index + 1
            start, refusals = len(cuda.calls), 0
            if refuse is not None:
                cuda.refuse = {start + refuse}
            for step in world.script():
                before = world.sizes()
                try:
                    step()
                except CommitError:
                    refusals += 1
                    assert world.sizes() == before
                    world.check()
                    step()
                world.check()
                for index, buffer in enumerate(world.buffers):
                    assert (buffer[: world.rows] == index + 1).all()
            assert refusals == (refuse is not None)
            assert world.sizes() == (0, 0, 3 * world.unit // world.ROW, 12)
            assert "cuMemRelease" not in cuda.calls[start:] and "cuMemCreate" not in cuda.calls[start:]
            return len(cuda.calls) - start

    total = run(None)
    assert total > 50
    for refuse in range(total):
        run(refuse)


def test_slots_move_out_of_a_tail_that_goes(cuda: FakeCuda) -> None:
    pool = pool_on(cuda)
    rows = pool.granularity // 64
    regions = Regions(arena_on(pool, units=8), 4, 2 * rows, 64)
    regions.resize(2 * rows)
    buffers = [regions.tensor(index, (2, 8), torch.float32) for index in range(4)]
    for index, buffer in enumerate(buffers):
        buffer[:] = torch.arange(2 * rows)[:, None, None] + index
    src = torch.arange(2 * rows - 10, 2 * rows)
    kv_relocate(buffers, src, torch.arange(10))
    regions.resize(rows)
    for index, buffer in enumerate(buffers):
        assert buffer[:10, 1, 7].tolist() == (src + index).tolist()
        assert buffer[10:rows, 0, 0].tolist() == list(range(10 + index, rows + index))

"""The CUDA arena over a fake driver: against a model, with every call refused in turn, handing memory over."""

import ctypes
import faulthandler
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from cuda.bindings import driver
from fake_cuda import GARBAGE, FakeCuda
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_nightjar.kernels.kv_relocate import kv_relocate
from sglang_nightjar.memory.arena import CommitError, Regions
from sglang_nightjar.memory.arena_cuda import CudaArena, DriverError, HandlePool, cuda_arena

UNITS = 6  # of an arena


def no_fence() -> None:
    """Nothing runs."""


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    fake = FakeCuda()
    with closing(fake):
        yield fake
        assert not fake.violations


def pool_on(cuda: FakeCuda) -> HandlePool:
    return HandlePool(0, driver=cuda, tensors=cuda)


def arena_on(pool: HandlePool, units: int = UNITS, fence: Callable[[], None] = no_fence) -> CudaArena:
    return CudaArena(units * pool.granularity, pool, fence)


def state(cuda: FakeCuda, pool: HandlePool) -> tuple[Any, ...]:
    """All that a refused call must leave as it was."""
    return dict(cuda.mappings), set(cuda.accessible), set(cuda.held), pool.spare, cuda.used


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, int, int | None]:
    """Which arena, a range of units, and after how many driver calls one fails."""
    start = draw(st.integers(0, UNITS - 1))
    return draw(st.integers(0, 1)), start, draw(st.integers(start + 1, UNITS)), draw(st.none() | st.integers(0, 20))


@settings(max_examples=300, deadline=None)
@given(memory=st.integers(4, 2 * UNITS), plan=st.lists(steps() | st.just("trim"), max_size=14))
def test_two_arenas_follow_their_model(memory: int, plan: list[Any]) -> None:
    """Each range is committed where none of it is, decommitted where all of it is; a refusal changes nothing."""
    cuda = FakeCuda(memory=0)
    with closing(cuda):
        unit = cuda.unit
        cuda.memory = memory * unit
        pool = pool_on(cuda)
        arenas = [arena_on(pool), arena_on(pool)]
        addresses = [arena.address for arena in arenas]
        model: list[list[int | None]] = [[None] * UNITS, [None] * UNITS]  # the byte that fills each unit
        for number, step in enumerate(plan, 1):
            cuda.refuse.clear()
            if step == "trim":
                pool.trim()
                assert pool.spare == 0
                continue
            which, start, stop, fail_after = step
            arena, content, offsets = arenas[which], model[which], (start * unit, stop * unit)
            committed = [byte is not None for byte in content[start:stop]]
            change = arena.decommit if all(committed) else arena.commit
            if any(committed) and not all(committed):
                with pytest.raises(AssertionError, match="must not be committed"):
                    arena.commit(*offsets)
                continue
            before = state(cuda, pool)
            lacking = change == arena.commit and offsets[1] - offsets[0] - pool.spare > cuda.memory - cuda.used
            if fail_after is not None:
                cuda.refuse_next(fail_after)
            try:
                change(*offsets)
            except CommitError:
                assert cuda.refused() or lacking
                if cuda.refused() and lacking:  # what was created could not be released either: kept, and counted below
                    assert state(cuda, pool)[:2] == before[:2] and pool.spare <= before[3] + unit
                else:
                    assert state(cuda, pool) == before
            else:
                assert not cuda.refused() and not lacking
                if change == arena.commit:
                    fresh = arena.tensor(offsets[0], (offsets[1] - offsets[0],), torch.uint8)
                    assert not fresh.any()
                    fresh.fill_(number)
                content[start:stop] = [None if change == arena.decommit else number] * (stop - start)
            assert [arena.address for arena in arenas] == addresses
            for arena, content in zip(arenas, model, strict=True):
                assert arena.committed == unit * sum(byte is not None for byte in content)
                for index, byte in enumerate(content):
                    assert (arena.address + index * unit in cuda.accessible) == (byte is not None)
                    if byte is not None:
                        assert (arena.tensor(index * unit, (unit,), torch.uint8) == byte).all()
            assert cuda.used == sum(arena.committed for arena in arenas) + pool.spare
        cuda.refuse.clear()
        for arena in arenas:
            arena.close()
        pool.trim()
        assert not cuda.violations and cuda.used == len(cuda.held) == len(cuda.mappings) == len(cuda.reservations) == 0


@pytest.mark.parametrize("spare", [0, 2])
def test_a_commit_refused_at_any_call_changes_nothing(cuda: FakeCuda, spare: int) -> None:
    pool = pool_on(cuda)
    arena, other = arena_on(pool), arena_on(pool)
    unit = arena.granularity
    arena.commit(0, unit)
    if spare:
        other.commit(0, spare * unit)
        other.decommit(0, spare * unit)
    before, named = state(cuda, pool), set()
    needed = (4 - spare) + 4 + 1 + 1  # create, map, one for access, one for zeros
    for after in range(needed):
        cuda.refuse_next(after)
        with pytest.raises(CommitError, match=f"no memory for {4 * unit} bytes at offset {unit}: ") as refusal:
            arena.commit(unit, 5 * unit)
        named.add(str(refusal.value).rsplit(": ", 2)[1])
        assert state(cuda, pool) == before and arena.committed == unit
    assert named == {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "CUDA error"}
    calls = len(cuda.calls)
    arena.commit(unit, 5 * unit)
    assert len(cuda.calls) - calls == needed and pool.spare == 0


def test_a_decommit_refused_at_any_call_keeps_contents_and_handles(cuda: FakeCuda) -> None:
    pool = pool_on(cuda)
    arena = arena_on(pool)
    unit = arena.granularity
    arena.commit(0, 4 * unit)
    whole = arena.tensor(0, (4 * unit,), torch.uint8)
    whole[:] = torch.arange(4 * unit) // unit + 1
    before = state(cuda, pool)
    for after in range(3):
        cuda.refuse_next(after)
        with pytest.raises(
            CommitError, match=f"{3 * unit} bytes at offset {unit} not given back: cuMemUnmap: CUDA_ERR"
        ):
            arena.decommit(unit, 4 * unit)
        assert state(cuda, pool) == before and arena.committed == 4 * unit
        assert whole[::unit].tolist() == [1, 2, 3, 4]
    arena.decommit(unit, 4 * unit)
    assert arena.committed == unit and pool.spare == 3 * unit and (whole[:unit] == 1).all()


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


def test_what_is_spare_goes_back_to_the_device_when_asked(cuda: FakeCuda) -> None:
    pool = pool_on(cuda)
    arena = arena_on(pool)
    arena.commit(0, 3 * pool.granularity)
    arena.decommit(0, 3 * pool.granularity)
    cuda.refuse_next(1)
    with pytest.raises(CommitError, match=f"{pool.granularity} bytes not given back: cuMemRelease: CUDA_ERROR_OUT"):
        pool.trim()
    assert pool.spare == cuda.used == pool.granularity
    pool.trim()
    assert pool.spare == cuda.used == 0


def test_new_handles_that_cannot_be_released_are_not_lost(cuda: FakeCuda) -> None:
    pool = pool_on(cuda)
    arena = arena_on(pool)
    calls = len(cuda.calls)
    cuda.refuse = {calls + 2, calls + 3}  # the third handle, and releasing the first
    with pytest.raises(CommitError, match="cuMemCreate"):
        arena.commit(0, 3 * pool.granularity)
    assert arena.committed == 0 and pool.spare == cuda.used == pool.granularity
    arena.commit(0, 3 * pool.granularity)
    assert pool.spare == 0


def test_a_refused_undoing_is_no_commit_error(cuda: FakeCuda) -> None:
    """A `CommitError` says that nothing has changed; here a unit stays mapped, and its handle goes to nobody."""
    pool = pool_on(cuda)
    arena = arena_on(pool)
    calls = len(cuda.calls)
    cuda.refuse = {calls + 3, calls + 4}  # the second map, and unmapping the first
    with pytest.raises(DriverError, match="cuMemUnmap: CUDA_ERROR_OUT_OF_MEMORY"):
        arena.commit(0, 2 * pool.granularity)
    assert pool.spare == 0 and len(cuda.mappings) == 1


def test_the_fence_comes_before_the_first_unmap(cuda: FakeCuda) -> None:
    events: list[str] = []

    def fence() -> None:
        events.append("fence")
        cuda.busy.clear()

    pool = pool_on(cuda)
    arena = arena_on(pool, fence=fence)
    unit = pool.granularity
    arena.commit(0, 4 * unit)
    assert events == []  # nothing is taken away
    cuda.busy.append(range(arena.address, arena.address + 4 * unit))
    arena.decommit(0, 2 * unit)
    assert events == ["fence"]
    cuda.busy.append(range(arena.address + 2 * unit, arena.address + 4 * unit))
    arena.close()
    assert events == ["fence", "fence"]


def test_a_fence_that_fails_changes_nothing(cuda: FakeCuda) -> None:
    def fence() -> None:
        raise RuntimeError("the event's stream has failed")

    pool = pool_on(cuda)
    arena = arena_on(pool, fence=fence)
    arena.commit(0, pool.granularity)
    before = state(cuda, pool)
    with pytest.raises(RuntimeError, match="the event's stream"):
        arena.decommit(0, pool.granularity)
    assert state(cuda, pool) == before and arena.committed == pool.granularity


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bfloat16])
def test_tensors_are_checked_against_the_arena(cuda: FakeCuda, dtype: torch.dtype) -> None:
    arena = arena_on(pool_on(cuda))
    whole = arena.tensor(0, (UNITS, arena.granularity // dtype.itemsize), dtype)
    assert whole.dtype == dtype and whole.data_ptr() == arena.address and whole.is_contiguous()
    for start, count in [(0, arena.size + 1), (arena.size, 1), (-64, 1), (0, 0)]:
        with pytest.raises(AssertionError, match="a tensor over"):
            arena.tensor(start, (count,), torch.uint8)
    with pytest.raises(AssertionError, match="elements of 4 bytes"):
        arena.tensor(2, (1,), torch.float32)


def test_a_tensor_elsewhere_is_noticed(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = arena_on(pool_on(cuda))
    monkeypatch.setattr(cuda, "view", lambda address, shape, dtype: torch.zeros(shape, dtype=dtype))
    with pytest.raises(AssertionError, match=f"not {arena.address + 64}: captured graphs"):
        arena.tensor(64, (4,), torch.float32)


def test_an_arena_is_closed_once_and_for_all(cuda: FakeCuda) -> None:
    pool = pool_on(cuda)
    arena = arena_on(pool)
    unit = pool.granularity
    arena.commit(0, unit)
    arena.commit(3 * unit, 5 * unit)
    for left in (2 * unit, unit, 0):  # a unit more goes each time, then the next call is refused
        cuda.refuse_next(1)
        with pytest.raises(CommitError, match="not given back: cuMem"):
            arena.close()
        assert arena.committed == left
    assert arena.committed == 0 and len(cuda.reservations) == 1
    arena.close()
    arena.close()
    assert not cuda.reservations and pool.spare == cuda.used == 3 * unit
    for use in (
        lambda: arena.commit(0, unit),
        lambda: arena.decommit(0, unit),
        lambda: arena.tensor(0, (1,), torch.int8),
    ):
        with pytest.raises(AssertionError, match="the arena is closed"):
            use()


def test_no_address_space_says_what_to_lower(cuda: FakeCuda) -> None:
    pool = pool_on(cuda)
    cuda.refuse_next(0)
    with pytest.raises(
        CommitError, match=f"no {64 * pool.granularity} bytes .*CUDA_ERROR_OUT_OF_MEMORY; lower --night"
    ):
        arena_on(pool, units=64)
    assert not cuda.reservations


def test_a_device_without_virtual_memory_is_named(cuda: FakeCuda) -> None:
    cuda.result = driver.CUresult.CUDA_ERROR_NOT_SUPPORTED
    cuda.refuse_next(0)
    with pytest.raises(DriverError, match="cuMemGetAllocationGranularity: CUDA_ERROR_NOT_SUPPORTED"):
        pool_on(cuda)


def test_room_for_any_number_of_bytes(cuda: FakeCuda) -> None:
    pool = pool_on(cuda)
    unit = pool.granularity
    assert [cuda_arena(nbytes, pool, no_fence).size for nbytes in (1, unit, unit + 1)] == [unit, unit, 2 * unit]


def signal_of_touching(address: int) -> int:
    """The signal that ends a process which reads a byte at `address`, 0 for none."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(address, 1)
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def test_the_fake_driver_knows_the_rules() -> None:
    """Each is broken once: refused, noted, and without effect."""
    cuda = FakeCuda()
    unit = cuda.unit
    with closing(cuda):
        pool = pool_on(cuda)
        prop, access = pool._prop, pool.access
        base = int(pool.call("cuMemAddressReserve", 4 * unit, unit, 0, 0))
        handle, released = (pool.call("cuMemCreate", unit, prop, 0) for _ in range(2))
        pool.call("cuMemRelease", released)
        pool.call("cuMemMap", base, unit, 0, handle, 0)
        assert signal_of_touching(base) == signal.SIGSEGV  # no access yet
        pool.call("cuMemSetAccess", base, unit, access, 1)
        assert ctypes.string_at(base, unit) == bytes([GARBAGE]) * unit
        cuda.busy.append(range(base + unit - 1, base + unit))
        before = state(cuda, pool)
        broken: list[tuple[Any, ...]] = [
            ("cuMemCreate", unit // 2, prop, 0),
            ("cuMemMap", base, unit, 0, handle, 0),
            ("cuMemMap", base + unit // 2, unit, 0, handle, 0),
            ("cuMemMap", base + 4 * unit, unit, 0, handle, 0),
            ("cuMemMap", base + unit, 2 * unit, 0, handle, 0),
            ("cuMemMap", base + unit, unit, 0, released, 0),
            ("cuMemSetAccess", base, 2 * unit, access, 1),
            ("cuMemSetAccess", base, unit, [], 0),
            ("cuMemUnmap", base + unit, unit),
            ("cuMemUnmap", base, 2 * unit),
            ("cuMemUnmap", base, unit),
            ("cuMemRelease", released),
            ("cuMemAddressFree", base, unit),
            ("cuMemAddressFree", base, 4 * unit),
        ]
        for number, (name, *arguments) in enumerate(broken, 1):
            with pytest.raises(DriverError, match=f"{name}: CUDA_ERROR_INVALID_VALUE"):
                pool.call(name, *arguments)
            assert len(cuda.violations) == number and state(cuda, pool) == before
        cuda.busy.clear()
        pool.call("cuMemRelease", handle)
        assert cuda.used == unit and ctypes.string_at(base, 1) == bytes([GARBAGE])  # its mapping keeps it
        pool.call("cuMemUnmap", base, unit)
        assert cuda.used == 0 and signal_of_touching(base) == signal.SIGSEGV

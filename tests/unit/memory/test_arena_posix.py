"""The host's arena against a model, the kernel's count of resident pages, and refusals, made and real."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from touching import signal_of_touching

from sglang_nightjar.memory import arena_posix
from sglang_nightjar.memory.arena import CommitError
from sglang_nightjar.memory.arena_posix import PosixArena, posix_arena, resident

PAGE = os.sysconf("SC_PAGE_SIZE")
UNITS = 12
MIB = 1 << 20


def resident_set() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int]:
    start = draw(st.integers(0, UNITS - 1))
    return start, draw(st.integers(start + 1, UNITS))


@settings(max_examples=100, deadline=None)
@given(granularity=st.sampled_from([PAGE, 8 * PAGE]), steps=st.lists(ranges(), max_size=12))
def test_arena_follows_its_model(granularity: int, steps: list[tuple[int, int]]) -> None:
    """Each range is committed where none of it is, decommitted where all of it is, and refused else."""
    arena = PosixArena(UNITS * granularity, granularity)
    model: list[int | None] = [None] * UNITS  # the byte that fills each unit
    for number, (start, stop) in enumerate(steps, 1):
        offsets = start * granularity, stop * granularity
        committed = [content is not None for content in model[start:stop]]
        if not any(committed):
            arena.commit(*offsets)
            fresh = arena.tensor(offsets[0], (offsets[1] - offsets[0],), torch.uint8)
            assert not fresh.any()
            fresh.fill_(number)
            model[start:stop] = [number] * (stop - start)
        elif all(committed):
            arena.decommit(*offsets)
            model[start:stop] = [None] * (stop - start)
        else:
            for change in (arena.commit, arena.decommit):
                with pytest.raises(AssertionError, match="must"):
                    change(*offsets)
        assert arena.committed == granularity * sum(content is not None for content in model)
        for unit, content in enumerate(model):
            offset = unit * granularity
            assert resident(arena.address + offset, granularity) == (0 if content is None else granularity)
            if content is not None:
                assert (arena.tensor(offset, (granularity,), torch.uint8) == content).all()
    arena.close()


@pytest.mark.parametrize(
    "bad", [(0, PAGE), (PAGE, 4 * PAGE), (0, 0), (4 * PAGE, 2 * PAGE), (-2 * PAGE, 0), (0, 1 << 20)]
)
def test_ranges_outside_the_arena_or_its_units_are_refused(bad: tuple[int, int]) -> None:
    arena = PosixArena(8 * PAGE, 2 * PAGE)
    with pytest.raises(AssertionError, match=r"range \["):
        arena.commit(*bad)
    assert arena.committed == 0


@pytest.mark.parametrize(("size", "granularity"), [(PAGE, 2 * PAGE), (PAGE, PAGE // 2), (0, PAGE)])
def test_impossible_granularities_are_refused(size: int, granularity: int) -> None:
    with pytest.raises(AssertionError, match="granularity"):
        PosixArena(size, granularity)


def test_units_of_a_gpu() -> None:
    arena = PosixArena(16 * MIB, 2 * MIB)
    arena.commit(2 * MIB, 6 * MIB)
    arena.decommit(4 * MIB, 6 * MIB)
    assert (
        arena.committed == resident(arena.address, arena.size) == resident(arena.address + 2 * MIB, 2 * MIB) == 2 * MIB
    )
    with pytest.raises(AssertionError, match=f"units of {2 * MIB} bytes"):
        arena.commit(4 * MIB, 5 * MIB)


def test_resident_memory_rises_and_falls_with_commits() -> None:
    arena = PosixArena(256 * MIB)
    before = resident_set()
    for start, stop, expected in [(0, 64, 64), (128, 192, 128)]:
        arena.commit(start * MIB, stop * MIB)
        assert resident_set() - before == pytest.approx(expected * MIB, rel=0.02)
    arena.decommit(0, 64 * MIB)
    assert resident_set() - before == pytest.approx(64 * MIB, rel=0.02)
    arena.decommit(128 * MIB, 192 * MIB)
    assert abs(resident_set() - before) < 0.02 * 64 * MIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8, torch.bfloat16])
def test_tensor_views_addresses_without_touching_them(dtype: torch.dtype) -> None:
    arena = PosixArena(64 * PAGE)
    whole = arena.tensor(0, (64, PAGE // dtype.itemsize), dtype)
    assert whole.dtype == dtype and whole.data_ptr() == arena.address and whole.is_contiguous()
    assert resident(arena.address, arena.size) == 0
    arena.commit(8 * PAGE, 9 * PAGE)
    whole[8] = 3
    assert (arena.tensor(8 * PAGE, (PAGE // dtype.itemsize,), dtype) == 3).all()
    assert resident(arena.address, arena.size) == PAGE
    inside = arena.tensor(8 * PAGE + 64, (), dtype)
    assert inside.shape == () and inside.data_ptr() == arena.address + 8 * PAGE + 64 and inside == 3


def test_tensor_outside_the_arena_is_refused() -> None:
    arena = PosixArena(4 * PAGE)
    for start, rows in [(0, 5), (4 * PAGE, 1), (PAGE, 4), (-PAGE, 1)]:
        with pytest.raises(AssertionError, match="a tensor"):
            arena.tensor(start, (rows, PAGE), torch.uint8)
    with pytest.raises(AssertionError, match="elements of 4 bytes"):
        arena.tensor(2, (1,), torch.float32)


def test_the_mapping_lives_as_long_as_a_tensor_over_it() -> None:
    arena = PosixArena(1 << 30)
    address, size = arena.address, arena.size
    arena.commit(0, PAGE)
    row = arena.tensor(0, (4, PAGE), torch.uint8)[0]
    row.fill_(7)
    arena.close()
    del arena
    gc.collect()
    assert (row == 7).all() and resident(address, size) == PAGE
    del row
    gc.collect()
    with pytest.raises(OSError):  # 1 GiB at this address is no longer all mapped
        resident(address, size)


def test_a_closed_arena_is_not_used() -> None:
    arena = PosixArena(4 * PAGE)
    arena.commit(0, PAGE)
    arena.close()
    arena.close()
    with pytest.raises(AssertionError, match="closed"):
        arena.commit(PAGE, 2 * PAGE)
    with pytest.raises(AssertionError, match="closed"):
        arena.decommit(0, PAGE)
    with pytest.raises(AssertionError, match="closed"):
        arena.tensor(0, (1,), torch.uint8)


def test_room_for_any_number_of_bytes() -> None:
    assert [posix_arena(nbytes).size for nbytes in (1, PAGE, PAGE + 1)] == [PAGE, PAGE, 2 * PAGE]


def test_a_kernel_without_populate_gets_its_pages_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_posix, "_MADV_POPULATE_WRITE", 9999)
    arena = PosixArena(8 * PAGE)
    arena.commit(2 * PAGE, 5 * PAGE)
    assert resident(arena.address, arena.size) == 3 * PAGE
    assert not arena.tensor(2 * PAGE, (3 * PAGE,), torch.uint8).any()


def test_a_refused_populate_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = PosixArena(8 * PAGE)
    populate = arena._populate

    def half_done(start: int, stop: int) -> None:
        populate(start, (start + stop) // 2)
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(arena, "_populate", half_done)
    with pytest.raises(CommitError, match=f"{4 * PAGE} bytes at offset {2 * PAGE}: Cannot allocate memory"):
        arena.commit(2 * PAGE, 6 * PAGE)
    assert arena.committed == resident(arena.address, arena.size) == 0
    monkeypatch.setattr(arena, "_populate", populate)
    arena.commit(0, 8 * PAGE)


def test_a_refused_decommit_keeps_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = PosixArena(4 * PAGE)
    arena.commit(0, 4 * PAGE)
    whole = arena.tensor(0, (4 * PAGE,), torch.uint8).fill_(5)

    def refuse(start: int, stop: int, advice: int) -> None:
        raise OSError(22, "Invalid argument")

    with monkeypatch.context() as patch, pytest.raises(CommitError, match="Invalid argument"):
        patch.setattr(arena, "_advise", refuse)
        arena.decommit(PAGE, 3 * PAGE)
    assert arena.committed == 4 * PAGE and (whole == 5).all()
    arena.decommit(PAGE, 3 * PAGE)
    assert resident(arena.address, arena.size) == 2 * PAGE


LIMITED = """
import resource
import torch
from sglang_nightjar.memory.arena import CommitError, Regions
from sglang_nightjar.memory.arena_posix import PosixArena, resident

MIB = 1 << 20
arena = PosixArena(256 * MIB)
regions = Regions(arena, 4, 16 * MIB, 4)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
limit = int(status["VmData"].split()[0]) * 1024 + 36 * MIB  # two buffers, and what the process itself takes
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
regions.resize(MIB)  # 16 MiB
rows = regions.tensor(3, (), torch.float32)[:MIB].fill_(2.5)
for _ in range(2):
    try:
        regions.resize(3 * MIB)  # 32 MiB more
    except CommitError as error:
        print(error)
    assert regions.committed_rows == MIB and arena.committed == 16 * MIB, arena.committed
    assert resident(arena.address, arena.size) == 16 * MIB
    assert (rows == 2.5).all()
regions.resize(MIB + MIB // 4)
assert arena.committed == resident(arena.address, arena.size) == 20 * MIB
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    PosixArena(1 << 40)
except CommitError as error:
    print(error)
"""


def test_a_limit_of_the_system_is_a_commit_error() -> None:
    """A process that may have 36 MiB more of data gets what fits and is refused the rest, twice the same."""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    first, second, address_space = done.stdout.splitlines()
    assert first == second and first.startswith(f"no memory for {8 * MIB} bytes at offset ")
    assert first.endswith(": Cannot allocate memory")
    assert address_space.startswith(f"no {1 << 40} bytes of address space: ") and "ulimit -v" in address_space


def test_touching_what_is_not_committed_faults() -> None:
    arena = PosixArena(4 * PAGE)
    arena.commit(0, 2 * PAGE)
    arena.decommit(PAGE, 2 * PAGE)
    faults = [signal_of_touching(arena.address + page * PAGE) for page in range(3)]
    assert faults == [0, signal.SIGSEGV, signal.SIGSEGV]

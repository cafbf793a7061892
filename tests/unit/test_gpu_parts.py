"""The parts of `gpu_check` that need a GPU, over the fake driver: all is right there, and faults are noticed.

Only what torch itself does on a GPU is left out: capturing, its streams, pinned copies, timing.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_world import device_on
from fake_cuda import FakeCuda

BENCH = str(Path(__file__).resolve().parents[2] / "bench")
MIB = 1 << 20


class Replay:
    """In place of a captured graph: runs again and writes where the first run did."""

    def __init__(self, run: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        self.run, self.found = run, run()

    def replay(self) -> None:
        for old, new in zip(self.found, self.run(), strict=True):
            old.copy_(new)


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    fake = FakeCuda(unit=MIB, memory=160 * MIB)
    with closing(fake):
        yield fake


@pytest.fixture
def parts(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    path = list(sys.path)
    sys.path.append(BENCH)
    import gpu_parts

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda ordinal: (cuda.memory - cuda.used, cuda.memory))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=cuda.memory))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda ordinal: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: stream)
    monkeypatch.setattr(gpu_parts, "CudaDevice", lambda ordinal: device_on(cuda))
    monkeypatch.setattr(gpu_parts, "on_gpu", lambda ordinal: torch.device("cpu"))
    monkeypatch.setattr(gpu_parts, "pinned_bandwidth", lambda where: 1e9)
    monkeypatch.setattr(gpu_parts, "capture", lambda run: (replay := Replay(run), replay.found))
    monkeypatch.setattr(gpu_parts, "GIB", 16 * MIB)
    monkeypatch.setattr(gpu_parts, "_STEP_MATRIX", 16)
    yield gpu_parts
    sys.path[:] = path


def results(rows: list[Any]) -> set[str]:
    return {row.result for row in rows}


def test_arena(parts: ModuleType, cuda: FakeCuda) -> None:
    rows = parts.check_arena(0)
    assert results(rows) == {"ok"} and not cuda.violations and not cuda.used
    refused = next(row for row in rows if row.check == "more than the device has")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in refused.figure and "0 MiB kept" in refused.figure


def test_an_arena_that_keeps_what_was_refused_is_noticed(
    parts: ModuleType, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_nightjar.memory.arena_cuda import HandlePool

    monkeypatch.setattr(HandlePool, "put_back", lambda pool, reused, created: pool.give(reused))
    rows = parts.check_arena(0)
    assert [row.check for row in rows if row.result == "FAILED"] == ["more than the device has"]


def test_reload(parts: ModuleType, cuda: FakeCuda) -> None:
    rows = parts.check_reload(0, 32 * MIB)
    assert results(rows) == {"ok"} and not cuda.violations
    assert [row.check.split(",")[0] for row in rows[1:4]] == [
        f"32 MiB in chunks of {chunk} MiB" for chunk in (16, 64, 32)
    ]


def test_graph(parts: ModuleType, cuda: FakeCuda) -> None:
    assert results(parts.check_graph(0)) == {"ok"} and not cuda.violations


def test_weights_that_come_back_wrong_are_noticed(
    parts: ModuleType, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_nightjar.memory.draft_store import DraftStore

    def reload(store: DraftStore, chunk: int, before: Callable[[], None]) -> None:
        store._arena.commit(0, store._size)

    monkeypatch.setattr(DraftStore, "reload", reload)
    with pytest.raises(RuntimeError, match="the graph read other weights"):
        parts.check_graph(0)


def test_moves(parts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts.check_moves(torch.device("cpu")).result == "ok"
    monkeypatch.setattr(parts, "kv_relocate", lambda buffers, src, dst: None)
    with pytest.raises(RuntimeError, match="moved wrongly"):
        parts.check_moves(torch.device("cpu"))

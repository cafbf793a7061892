"""Weights that leave the device and come back, at the same addresses and bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sglang_nightjar.memory.arena import CommitError
from sglang_nightjar.memory.arena_posix import PosixArena, posix_arena
from sglang_nightjar.memory.draft_store import DraftStore, MirrorError


class Derived:
    """A `quant_method` that keeps something it made of the weight."""

    def __init__(self) -> None:
        self.total: float | None = None

    def weights_moved(self, module: torch.nn.Linear) -> None:
        self.total = float(module.weight.sum())

    def weights_gone(self, module: torch.nn.Linear) -> None:
        self.total = None


class Model(torch.nn.Module):
    def __init__(self, rope: torch.Tensor) -> None:
        super().__init__()
        self.first = torch.nn.Linear(37, 11)
        self.second = torch.nn.Linear(11, 300, bias=False)
        self.second.quant_method = Derived()
        self.register_buffer("q", torch.randint(-127, 128, (50, 3), dtype=torch.int8))
        self.register_buffer("rope", rope)
        self.register_buffer("empty", torch.empty(0))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model(torch.randn(9))


def make(model: Model, folder: Path, arena: Callable[[int], PosixArena] = posix_arena) -> DraftStore:
    target = torch.nn.Module()
    target.register_buffer("rope", model.rope)
    return DraftStore(model, arena, shared_with=target, folder=folder)


def nothing() -> None:
    pass


def test_weights_come_back_bit_for_bit_at_the_same_addresses(model: Model, tmp_path: Path) -> None:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    store = make(model, tmp_path)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    x = torch.randn(2, 37)
    expected = model.second(model.first(x))
    for _ in range(3):
        store.release()
        assert not store.resident and model.second.quant_method.total is None
        store.reload(100, nothing)
        assert store.resident and model.second.quant_method.total == float(before["second.weight"].sum())
        store.verify()
        assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
        assert addresses == {name: tensor.data_ptr() for name, tensor in tensors.items()}
        assert torch.equal(model.second(model.first(x)), expected)


def test_what_the_target_shares_stays(model: Model, tmp_path: Path) -> None:
    rope = model.rope.data_ptr()
    store = make(model, tmp_path)
    store.release()
    assert model.rope.data_ptr() == rope and torch.isfinite(model.rope).all()
    assert not list(tmp_path.iterdir()), "the mirror has no name"


def test_no_more_than_a_chunk_is_copied_at_a_time(model: Model, tmp_path: Path) -> None:
    store = make(model, tmp_path)
    store.release()
    asked = []
    store.reload(1000, lambda: asked.append(None))
    assert len(asked) == -(-store.nbytes // 1000) + 1, "and once before the module that derives something"


def test_a_broken_mirror_is_noticed_and_the_memory_given_back(model: Model, tmp_path: Path) -> None:
    store = make(model, tmp_path)
    store.release()
    store._file.seek(40)
    store._file.write(b"broken")
    store._file.flush()
    with pytest.raises(MirrorError, match="read back as"):
        store.reload(4096, nothing)
    assert not store.resident and store.intact() is None
    store._file.truncate(100)
    assert "has 100 bytes" in (store.intact() or "")
    with pytest.raises(MirrorError, match="ends at 100"):
        store.reload(4096, nothing)
    assert not store.resident


def test_verify_notices_a_changed_weight(model: Model, tmp_path: Path) -> None:
    store = make(model, tmp_path)
    with torch.no_grad():
        model.first.weight[0, 0] += 1.0
    with pytest.raises(MirrorError, match="weights are"):
        store.verify()


def test_interrupted_reload_gives_the_memory_back(model: Model, tmp_path: Path) -> None:
    store = make(model, tmp_path)
    store.release()

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        store.reload(64, stop)
    assert not store.resident
    store.reload(64, nothing)
    store.verify()


def test_without_memory_nothing_changes(model: Model, tmp_path: Path) -> None:
    class Full(PosixArena):
        full = False

        def commit(self, start: int, stop: int) -> None:
            if self.full:
                raise CommitError("no memory")
            super().commit(start, stop)

    arenas: list[Full] = []

    def make_full(nbytes: int) -> Full:
        arenas.append(Full(-(-nbytes // 4096) * 4096))
        return arenas[-1]

    store = make(model, tmp_path, make_full)
    store.release()
    arenas[0].full = True
    with pytest.raises(CommitError):
        store.reload(64, nothing)
    assert not store.resident
    arenas[0].full = False
    store.reload(64, nothing)
    store.verify()

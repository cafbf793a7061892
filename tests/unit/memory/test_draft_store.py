"""Weights that leave the device and come back, at the same addresses and bit for bit."""

from pathlib import Path

import pytest
import torch
from arena_kinds import Place

from sglang_nightjar.memory.arena import Arena, CommitError
from sglang_nightjar.memory.arena_posix import PAGE, PosixArena
from sglang_nightjar.memory.device import DeviceMemory, PosixDevice
from sglang_nightjar.memory.draft_store import DraftStore
from sglang_nightjar.memory.mirror import MirrorError
from sglang_nightjar.memory.mirror_posix import FileMirror


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


def make(model: Model, device: DeviceMemory) -> DraftStore:
    target = torch.nn.Module()
    target.register_buffer("rope", model.rope)
    return DraftStore(model, device, shared_with=target)


def nothing() -> None:
    pass


def test_weights_come_back_bit_for_bit_at_the_same_addresses(model: Model, place: Place) -> None:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    store = make(model, place.memory)
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


def test_what_the_target_shares_stays(model: Model, place: Place, tmp_path: Path) -> None:
    rope = model.rope.data_ptr()
    store = make(model, place.memory)
    store.release()
    assert model.rope.data_ptr() == rope and torch.isfinite(model.rope).all()
    assert not list(tmp_path.iterdir()), "the mirror has no name"


def test_no_more_than_a_chunk_is_copied_at_a_time(model: Model, place: Place) -> None:
    store = make(model, place.memory)
    store.release()
    asked = []
    store.reload(1000, lambda: asked.append(None))
    assert len(asked) == -(-store.nbytes // 1000) + 1, "and once before the module that derives something"


@pytest.mark.parametrize(("chunk_bytes", "pauses"), [(399, 5), (400, 5), (800, 3), (2000, 1)])
def test_modules_derive_no_more_than_a_chunk_at_a_time(place: Place, chunk_bytes: int, pauses: int) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(10, 10, bias=False) for _ in range(5)))  # 400 bytes each
    for linear in model:
        linear.quant_method = Derived()
    store = DraftStore(model, place.memory, shared_with=torch.nn.Module())
    store.release()
    asked = []
    store.reload(chunk_bytes, lambda: asked.append(None))
    assert len(asked) == -(-store.nbytes // chunk_bytes) + pauses


def test_a_broken_mirror_is_noticed_and_the_memory_given_back(model: Model, tmp_path: Path) -> None:
    store = make(model, PosixDevice(tmp_path))
    assert isinstance(store.mirror, FileMirror)
    store.release()
    store.mirror.file.seek(40)
    store.mirror.file.write(b"broken")
    store.mirror.file.flush()
    with pytest.raises(MirrorError, match="read back as"):
        store.reload(4096, nothing)
    assert not store.resident and store.intact() is None
    store.mirror.file.truncate(100)
    assert "has 100 bytes" in (store.intact() or "")
    with pytest.raises(MirrorError, match="ends at 100"):
        store.reload(4096, nothing)
    assert not store.resident


def test_verify_notices_a_changed_weight(model: Model, place: Place) -> None:
    store = make(model, place.memory)
    with torch.no_grad():
        model.first.weight[0, 0] += 1.0
    with pytest.raises(MirrorError, match="weights are"):
        store.verify()


def test_interrupted_reload_gives_the_memory_back(model: Model, place: Place) -> None:
    store = make(model, place.memory)
    store.release()

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        store.reload(64, stop)
    assert not store.resident
    store.reload(64, nothing)
    store.verify()


def test_without_memory_nothing_changes(model: Model) -> None:
    class Full(PosixArena):
        full = False

        def commit(self, start: int, stop: int) -> None:
            if self.full:
                raise CommitError("no memory")
            super().commit(start, stop)

    class FullDevice(PosixDevice):
        def arena(self, nbytes: int) -> Arena:
            arenas.append(Full(-(-nbytes // PAGE) * PAGE))
            return arenas[-1]

    arenas: list[Full] = []
    store = make(model, FullDevice())
    store.release()
    arenas[0].full = True
    with pytest.raises(CommitError):
        store.reload(64, nothing)
    assert not store.resident
    arenas[0].full = False
    store.reload(64, nothing)
    store.verify()


def test_a_refused_release_keeps_the_memory_and_a_reload_mends_it(model: Model) -> None:
    class Clinging(PosixArena):
        refusals = 0

        def decommit(self, start: int, stop: int) -> None:
            if self.refusals:
                self.refusals -= 1
                raise CommitError("still here")
            super().decommit(start, stop)

    class ClingingDevice(PosixDevice):
        def arena(self, nbytes: int) -> Arena:
            arenas.append(Clinging(-(-nbytes // PAGE) * PAGE))
            return arenas[-1]

    arenas: list[Clinging] = []
    store = make(model, ClingingDevice())
    total = model.second.quant_method.total
    arenas[0].refusals = 1
    with pytest.raises(CommitError, match="still here"):
        store.release()
    assert store.resident and model.second.quant_method.total is None, "what modules derived is gone"
    store.reload(64, nothing)
    assert model.second.quant_method.total == total
    store.verify()
    store.release()
    assert not store.resident

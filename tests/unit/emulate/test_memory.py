"""Moving the draft: the link's time in the background, the relocation's between two steps."""

import time
from pathlib import Path

import pytest
import torch

from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.emulate import memory as module
from sglang_nightjar.emulate.agreement import Agreement
from sglang_nightjar.emulate.device import EmulatedDevice
from sglang_nightjar.emulate.scale import SCALE
from sglang_nightjar.memory.device import PosixDevice
from sglang_nightjar.simulate.acceptance import AcceptanceSpec
from sglang_nightjar.simulate.protocols import ServerOptions
from sglang_nightjar.simulate.setups import SET_UPS

SET_UP = SET_UPS["4090-r1-qwen-7b"]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    made = EmulatedDevice(SET_UP, 1.0, Agreement(AcceptanceSpec()))
    monkeypatch.setattr(module, "require_current", lambda: made)
    return made


def test_reload_takes_the_link_s_time_in_chunks(device: EmulatedDevice, tmp_path: Path) -> None:
    draft = torch.nn.Linear(256, 64, bias=False)  # 64 KiB
    before = draft.weight.detach().clone()
    store = module.EmulatedDraftStore(draft, PosixDevice(tmp_path), shared_with=torch.nn.Module())
    store.release()
    assert not store.resident
    permissions = []
    began = time.perf_counter()
    store.reload(1 << 14, lambda: permissions.append(time.perf_counter() - began))
    seconds = time.perf_counter() - began
    assert torch.equal(draft.weight, before)
    expected = device.cost.reload_s()
    assert len(permissions) == 4 and permissions[3] >= 0.7 * expected and expected <= seconds < expected + 0.25
    work = device.report()["work"]
    assert work["reload"]["count"] == 4 and work["reload"]["seconds"] == pytest.approx(expected)
    assert work["evict"]["seconds"] == ServerOptions().evict_s


def test_chunks_are_ten_milliseconds_of_the_link_or_more(device: EmulatedDevice) -> None:
    assert module.chunk_bytes(device, NightjarConfig()) == int(0.01 * SET_UP.device.link_bytes_s) // SCALE
    assert module.chunk_bytes(device, NightjarConfig(reload_chunk_mb=512)) == (512 << 20) // SCALE


def test_relocation_is_charged_by_the_slot(device: EmulatedDevice) -> None:
    began = time.perf_counter()
    module.charge_relocation(device, 0, began)
    assert device.report()["work"]["relocate"]["count"] == 0
    module.charge_relocation(device, 20_000, began)
    assert time.perf_counter() - began >= device.cost.relocate_s(20_000) > 1e-3

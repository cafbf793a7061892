"""Set-ups by name and by file: sizes that give the measured slots, and steps that take what was measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.emulate import options as module
from sglang_nightjar.emulate.agreement import Agreement
from sglang_nightjar.emulate.checkpoint import Role, prepare_checkpoint
from sglang_nightjar.emulate.device import EmulatedDevice
from sglang_nightjar.emulate.scale import budget_bytes, scaled
from sglang_nightjar.emulate.set_up import find_emulated
from sglang_nightjar.errors import UserError
from sglang_nightjar.simulate.acceptance import AcceptanceSpec

POINTS: dict[str, Any] = {
    "name": "my box, two cores",
    "source": "by hand",
    "batches": [1, 4],
    "gammas": [0, 1, 3],
    "seconds": [[0.1, 0.2], [0.14, 0.3], [0.2, 0.5]],
    "prefill_token_s": 1e-3,
    "prefill_step_s": 0.05,
    "draft_token_s": 2e-3,
    "kv_token_s": 1e-6,
    "slots_resident": 16_384,
    "slots_evicted": 22_000,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTJAR_CACHE", str(tmp_path))


def file(tmp_path: Path, **change: Any) -> str:
    path = tmp_path / "box.json"
    path.write_text(json.dumps(POINTS | change))
    return str(path)


@pytest.mark.parametrize(("small", "large"), [(16_384, 22_000), (16_384, 16_500), (1000, 9000), (16_384, 16_384)])
def test_made_up_sizes_give_the_slots_that_were_measured(tmp_path: Path, small: int, large: int) -> None:
    found = find_emulated(file(tmp_path, slots_resident=small, slots_evicted=large))
    set_up = found.set_up
    assert (found.slots(True), found.slots(False)) == (small, large)
    assert set_up.slots(True) == small and found.elastic == (large > small)
    assert set_up.slots(False) == large or not found.elastic
    # What the emulator makes of them: bytes of one GPU's models and pools, divided.
    target, draft = scaled(set_up.target), scaled(set_up.draft)
    room = budget_bytes(set_up) - target.weight_bytes
    assert (room - draft.weight_bytes) // (target.kv_bytes + draft.kv_bytes) == small
    assert room // target.kv_bytes == large or not found.elastic
    assert room < 200 << 20


def test_its_checkpoints_have_a_name_of_plain_letters(tmp_path: Path) -> None:
    folder = prepare_checkpoint(find_emulated(file(tmp_path)).set_up, Role.DRAFT)
    assert folder.name.startswith("my-box-two-cores-draft-")


def test_steps_take_what_was_measured(tmp_path: Path) -> None:
    forwards = find_emulated(file(tmp_path)).forwards
    assert forwards.target_s(4, 1000, 4, prompts=False) == pytest.approx(0.2 + 1e-3)
    assert forwards.target_s(16, 0, 4, prompts=False) == pytest.approx(0.5)
    assert forwards.target_s(3, 0, 1, prompts=False) == pytest.approx(0.17), "between gamma 1 and 3"
    assert forwards.target_s(100, 100, 2, prompts=True) == pytest.approx(0.15)
    assert forwards.draft_s(8, 0, 4) == 0.0, "a chain's forwards are in the measured step"
    assert forwards.draft_s(58, 0, 4) == pytest.approx(50 * 2e-3), "a catch-up is not"


def test_the_device_charges_them(tmp_path: Path) -> None:
    found = find_emulated(file(tmp_path))
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def clock() -> float:
        now[0] += 1e-6
        return now[0]

    device = EmulatedDevice(found.set_up, 2.0, Agreement(AcceptanceSpec()), clock, sleep, found.forwards)
    for _ in range(3):
        device.draft_forward(device.clock(), 4, 0, 4)
    device.target_forward(device.clock(), 16, 0, 4, prompts=False)
    work = device.report()["work"]
    assert (work["draft"]["count"], work["draft"]["seconds"]) == (3, 0.0)
    assert work["target"]["seconds"] == pytest.approx(0.5) and now[0] == pytest.approx(0.25, abs=1e-4)


def emulated(path: str, **options: Any) -> tuple[NightjarConfig, dict[str, Any]]:
    own = NightjarConfig(**{"platform": "cpu", "emulate": path, "max_gamma": 3, **options})
    return module.emulated_options(own, module.find(own), {})


def test_a_server_is_started_with_its_slots(tmp_path: Path) -> None:
    path = file(tmp_path)
    assert emulated(path)[1]["max_total_tokens"] == 16_384
    assert emulated(path, policy="off")[1]["max_total_tokens"] == 22_000
    assert emulated(path)[0].elastic == "auto"
    same = file(tmp_path, slots_evicted=16_384)
    assert emulated(same)[0].elastic == "off", "nobody knows what it would gain"


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"slots_evicted": 16_384}, {"elastic": "on"}, "as many slots without the draft as with it"),
        ({}, {"max_gamma": 5}, "was measured up to gamma 3: give --nightjar-max-gamma 3"),
        ({"batches": [4, 1]}, {}, "field batches must rise"),
    ],
)
def test_mistakes(tmp_path: Path, change: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        emulated(file(tmp_path, **change), **options)
    assert message in str(raised.value)

"""The draft's forward: right from its own KV, wrong from a stale one, and charged for."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_nightjar.emulate import draft as module
from sglang_nightjar.emulate.agreement import Agreement
from sglang_nightjar.emulate.context_hash import context_hash, next_tokens, weight_values
from sglang_nightjar.emulate.device import EmulatedDevice, Work
from sglang_nightjar.emulate.vocabulary import FIRST, VOCABULARY
from sglang_nightjar.simulate.acceptance import AcceptanceSpec, Domain
from sglang_nightjar.simulate.setups import SET_UPS

LENGTH, REQUESTS = 40, 24


def emulated(monkeypatch: pytest.MonkeyPatch, alpha: float) -> EmulatedDevice:
    spec = AcceptanceSpec((Domain(alpha, concentration=1e9),), calibration=0.0)
    device = EmulatedDevice(SET_UPS["4090-r1-qwen-7b"], 1000.0, Agreement(spec))
    monkeypatch.setattr(module, "require_current", lambda: device)
    return device


class Pair:
    """The draft, and beside it what the target would answer."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.weights = weight_values(np.arange(500))
        self.table = torch.zeros((REQUESTS, 64), dtype=torch.int32)
        self.table[:, :LENGTH] = torch.from_numpy(rng.permutation(REQUESTS * LENGTH) + 1).view(REQUESTS, LENGTH)
        self.tokens = torch.from_numpy(rng.integers(FIRST, len(VOCABULARY), (REQUESTS, LENGTH)))
        buffers = [torch.zeros((REQUESTS * LENGTH + 1, 1, 6)) for _ in range(2)]
        pool = SimpleNamespace(k_buffer=buffers[:1], v_buffer=buffers[1:])
        self.runner = SimpleNamespace(
            model=SimpleNamespace(weight=torch.from_numpy(self.weights.copy().view(np.float32))),
            token_to_kv_pool=pool,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
        )

    def target(self) -> list[int]:
        """The target's next token after each whole request."""
        rows = torch.zeros((REQUESTS * LENGTH + 1, 6), dtype=torch.int32).numpy().view(np.uint32)
        arguments = [tensor.numpy() for tensor in self.arguments(0, LENGTH)[:5]]
        hashes, _ = context_hash(*arguments, self.table.numpy(), rows, rows.copy())
        return next_tokens(hashes[LENGTH - 1 :: LENGTH], self.weights).tolist()

    def arguments(self, start: int, stop: int) -> list[Any]:
        count = stop - start
        return [
            self.tokens[:, start:stop].flatten(),
            torch.arange(start, stop).repeat(REQUESTS),
            self.table[:, start:stop].flatten().to(torch.int64),
            torch.arange(REQUESTS),
            torch.arange(0, REQUESTS * count + 1, count),
            torch.full((REQUESTS,), stop),
        ]


def test_agrees_fully_at_alpha_1_however_it_got_there(monkeypatch: pytest.MonkeyPatch) -> None:
    device, pair = emulated(monkeypatch, 1.0), Pair()
    draft = module.EmulatedDraft(pair.runner)
    draft(*pair.arguments(0, 33))
    for position in range(33, LENGTH - 1):
        draft(*pair.arguments(position, position + 1))
    logits = draft(*pair.arguments(LENGTH - 1, LENGTH))
    assert logits.shape == (REQUESTS, len(VOCABULARY)) and logits.argmax(-1).tolist() == pair.target()
    cost, account = device.cost, device.report()["work"][Work.DRAFT.value]
    expected = cost.catchup_s(33 * REQUESTS, 33 * REQUESTS)
    expected += sum(cost.draft_s(REQUESTS, 1, length * REQUESTS) for length in range(34, LENGTH + 1))
    assert account["count"] == 8 and account["seconds"] == pytest.approx(expected)


def test_a_stale_slot_makes_it_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lag that was not caught up with: the last token before is missing in the draft's KV."""
    emulated(monkeypatch, 1.0)
    pair = Pair()
    draft = module.EmulatedDraft(pair.runner)
    draft(*pair.arguments(0, LENGTH - 2))
    answers = draft(*pair.arguments(LENGTH - 1, LENGTH)).argmax(-1).tolist()
    assert sum(a == b for a, b in zip(answers, pair.target(), strict=True)) <= 3


def test_weights_that_did_not_come_back_make_it_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated(monkeypatch, 1.0)
    pair = Pair()
    pair.runner.model.weight.zero_()
    answers = module.EmulatedDraft(pair.runner)(*pair.arguments(0, LENGTH)).argmax(-1).tolist()
    assert not any(a == b for a, b in zip(answers, pair.target(), strict=True))


def test_the_probability_it_states_is_its_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated(monkeypatch, 0.8)
    pair = Pair()
    stated = module.EmulatedDraft(pair.runner)(*pair.arguments(0, LENGTH)).softmax(-1).max(-1).values
    torch.testing.assert_close(stated, torch.full((REQUESTS,), 0.8), atol=1e-3, rtol=0)

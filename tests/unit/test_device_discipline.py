"""The worker's code over tensors of a device that is not the host: nothing is mixed, and every wait is a counted read.

The same code, and the same random histories, as on the CPU; the kernels behind it are stood in for (`tests/kernels` has
those).
"""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_histories import MiniScheduler, ReadableDraft, numbers
from pretend_device import DEVICE, PretendDevice, inner, on_device

from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.controller_start import start_controller
from sglang_nightjar.kernels.draft_lens import draft_lens_reference
from sglang_nightjar.speculation import draft_state, transfer, worker
from sglang_nightjar.speculation.inputs import ChainDraftInput, chain_verify_input
from sglang_nightjar.speculation.late_tokens import LateTokens
from sglang_nightjar.speculation.same_batch import SameBatch
from sglang_nightjar.speculation.sampling import accepted_drafts, most_likely
from sglang_nightjar.speculation.transfer import host_lengths, to_device, to_host


class Watch:
    """A `Stopwatch` on events: asked before anything was read, it would have to wait."""

    device: PretendDevice

    def __init__(self) -> None:
        self.stopped_at: int | None = None

    def start(self) -> None: ...

    def stop(self) -> None:
        self.stopped_at = self.device.reads

    def seconds(self) -> float:
        if self.stopped_at is None:
            return 0.0
        assert self.device.reads > self.stopped_at, "the device has not been waited for since"
        return 0.25


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendDevice]:
    def lens(valid: torch.Tensor, table: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        return on_device(draft_lens_reference(inner(valid), inner(table), inner(rows), inner(seq_lens)))

    def set_valid(valid: torch.Tensor, slots: torch.Tensor, seen: Any) -> None:
        assert slots.device == valid.device and (isinstance(seen, bool) or seen.device == valid.device)
        inner(valid)[inner(slots).long()] = seen if isinstance(seen, bool) else inner(seen)

    monkeypatch.setattr(draft_state, "draft_lens", lens)
    monkeypatch.setattr(draft_state, "set_valid", set_valid)
    monkeypatch.setattr(transfer, "_pinned", lambda tensor: tensor)
    monkeypatch.setattr(transfer, "CudaStopwatch", Watch)
    with PretendDevice() as pretend:
        monkeypatch.setattr(Watch, "device", pretend, raising=False)
        yield pretend


def test_what_the_device_refuses(device: PretendDevice) -> None:
    """That the other tests would notice."""
    there, here = to_device(torch.tensor([3, 1, 2]), DEVICE), torch.tensor([0, 1, 0])
    assert there.device == DEVICE and to_host(there).tolist() == [3, 1, 2] and device.reads == 1
    for wrong in (
        lambda: there + here,
        lambda: there[here],
        lambda: there[there > 1],
        lambda: there.nonzero(),
        lambda: bool((there > 1).any()),
        lambda: int(there.sum()),
        lambda: here.repeat_interleave(there),
    ):
        with pytest.raises(AssertionError):
            wrong()
    for wrong in (there.numpy, there.tolist):
        with pytest.raises((RuntimeError, TypeError)):
            wrong()
    assert to_host(there + 1).tolist() == [4, 2, 3] and device.reads == 2


def test_every_draft_follows_from_its_whole_past(device: PretendDevice) -> None:
    """Random histories as on the CPU; a prefill or a round reads the device at most once: how far requests lag."""
    waited = steps = 0
    for seed in range(20):
        scheduler = MiniScheduler(seed, draft=ReadableDraft(DEVICE, device.unseen))
        for _ in range(60):
            before = device.reads
            scheduler.step()
            assert device.reads - before <= 1
            steps += device.reads - before
        waited += scheduler.waited
    assert waited > 20 and steps > 200, "the histories exercise too little"


def test_lengths_come_from_the_hosts_copy(device: PretendDevice) -> None:
    batch = SimpleNamespace(seq_lens=to_device(torch.tensor([5, 6]), DEVICE), seq_lens_cpu=torch.tensor([5, 6]))
    assert host_lengths(batch).tolist() == [5, 6] and device.reads == 0
    batch.seq_lens_cpu = None  # SGLang does not keep one for every attention backend
    assert host_lengths(batch).tolist() == [5, 6] and device.reads == 1


def test_verification_stays_on_the_device(device: PretendDevice) -> None:
    candidates = to_device(torch.tensor([[5, 6, 7], [8, 9, 10]]), DEVICE)
    verify = chain_verify_input(candidates, to_device(torch.tensor([4, 20]), DEVICE))
    fields = (verify.draft_token, verify.positions, verify.retrieve_index, verify.retrieve_next_token)
    assert {field.device for field in (*fields, verify.retrieve_next_sibling, verify.custom_mask)} == {DEVICE}
    accepted = accepted_drafts(to_device(torch.tensor([[6, 1, 1], [9, 10, 1]]), DEVICE), candidates)
    chosen = most_likely(to_device(torch.tensor([[0.9, 0.1], [0.8, 0.7]]), DEVICE), 3)
    assert device.reads == 0
    assert (numbers(accepted), numbers(chosen)) == ([1, 2], [1, 2])


class Target:
    """A target worker whose forward gives logits that make the sampler draw what `draws` says."""

    def __init__(self) -> None:
        self.model_runner = SimpleNamespace(sampler=None)
        self.modes: list[str] = []

    def forward_batch_generation(self, batch: Any = None, forward_batch: Any = None, is_verify: bool = False) -> Any:
        self.modes.append(forward_batch)
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=None), can_run_cuda_graph=True)


class Worker(worker.NightjarStandaloneWorker):
    """The real steps over a draft whose KV can be read and a target that agrees with every draft."""

    def __init__(self, device: PretendDevice, scheduler: MiniScheduler, directive: Any) -> None:
        self._draft_worker = scheduler.draft
        self._target_worker = Target()
        self.device = DEVICE
        self._same_requests = SameBatch()
        self.req_to_token_pool = scheduler.draft.req_to_token_pool
        self._late = LateTokens()
        own = start_controller(NightjarConfig(platform="cpu", policy="static:3"), rank=0, max_gamma=3)
        own.directive = directive
        self._controller = own
        self.asked: list[int] = []

    def _before_verification(self, gamma: int) -> None:
        self.asked.append(gamma)


@pytest.mark.parametrize(("gamma", "reads"), [(0, 0), (3, 2)])
def test_a_decode_step_reads_no_more_than_it_must(
    device: PretendDevice, monkeypatch: pytest.MonkeyPatch, gamma: int, reads: int
) -> None:
    """At gamma 0 nothing: the host goes on while the device computes. Else the lags before, and the outcome after."""
    scheduler = MiniScheduler(0, draft=ReadableDraft(DEVICE, device.unseen))
    while len(scheduler.running) < 3:
        scheduler.prefill()
    rows = list(scheduler.running)
    for row in rows:
        req = scheduler.running[row]
        req.sampling_params = SimpleNamespace(
            custom_params=None, frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, min_new_tokens=0
        )
        req.nightjar_story = SimpleNamespace(drafted=0, tokens=0)
        for position in range(req.seq_len, req.seq_len + gamma + 1):
            scheduler._write_row(row, position, [scheduler._slot()])
    batch = scheduler.batch(
        rows,
        spec_info=ChainDraftInput(bonus_tokens=scheduler._there([scheduler.running[row].output[-1] for row in rows])),
        orig_seq_lens=None,
        enable_overlap=False,
        has_grammar=False,
        return_logprob=False,
        sampling_info=None,
    )

    def draw(*, candidates: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.cat((candidates[:, 1:], candidates[:, :1] * 0), 1)

    monkeypatch.setattr(worker, "sample_chain", draw)
    monkeypatch.setattr(worker, "eagle_prepare_for_verify", lambda *_: ("verify", True))
    monkeypatch.setattr(worker, "ForwardBatch", SimpleNamespace(init_new=lambda *_, **__: "decode"))
    directive = SimpleNamespace(gamma=gamma, catchup_tokens=1000, verify_budget=None)
    monkeypatch.setattr(ReadableDraft, "context", lambda self: nullcontext())
    made = Worker(device, scheduler, directive)
    before = device.reads
    result, facts = made._decode(batch, None)
    assert device.reads - before == reads
    assert made.asked == [gamma] and made._target_worker.modes == ["verify" if gamma else "decode"]
    assert result.accept_lens.device == result.next_token_ids.device == result.new_seq_lens.device == DEVICE
    assert numbers(result.accept_lens) == [gamma + 1] * len(rows) and facts.gamma == gamma
    assert facts.drafted == (len(rows) if gamma else 0)
    assert (facts.tokens, facts.rejected) == (facts.drafted * (gamma + 1), 0)

"""The draft's bookkeeping, against a draft whose KV can be read (`draft_histories.py`)."""

from types import SimpleNamespace

import pytest
import torch
from draft_histories import MiniScheduler, ReadableDraft

from sglang_nightjar.speculation.inputs import ChainDraftInput, chain_verify_input
from sglang_nightjar.speculation.reading import catchup_plan


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(200))
def test_every_draft_follows_from_its_whole_past(seed: int, overlap: bool) -> None:
    """Random prefills, rounds, ends and evictions, on and off: no draft is ever made from stale or missing KV."""
    scheduler = MiniScheduler(seed, overlap)
    for _ in range(120):
        scheduler.step()


def test_the_runs_above_exercise_enough() -> None:
    runs = [MiniScheduler(seed) for seed in range(10)]
    for scheduler in runs:
        for _ in range(120):
            scheduler.step()
    assert sum(run.draft.forwards for run in runs) > 400
    assert sum(len(run.cache) for run in runs) > 150
    assert sum(run.waited for run in runs) > 20, "catch-up in pieces"


@pytest.mark.parametrize(("accept_len", "seen"), [(1, 1), (2, 2), (3, 3), (4, 3)])
def test_settle_keeps_what_was_accepted_and_seen(accept_len: int, seen: int) -> None:
    """gamma 3: slots of the bonus token and three drafts, the third of which no draft forward has read."""
    draft = ReadableDraft()
    draft.req_to_token_pool.req_to_token[2, :8] = torch.arange(11, 19)
    draft.state.mark(torch.arange(1, 30))
    batch = SimpleNamespace(req_pool_indices=torch.tensor([2]), seq_lens=torch.tensor([4]))
    draft.settle(batch, torch.tensor([accept_len], dtype=torch.int32), 3, torch.tensor([True]))
    lens = draft.state.draft_lens(draft.req_to_token_pool.req_to_token, torch.tensor([2]), torch.tensor([8]))
    assert lens.tolist() == [4 + seen]


def test_committed_tokens_must_exist() -> None:
    draft = ReadableDraft()
    req = SimpleNamespace(rid="r", origin_input_ids=[1, 2], output_ids=[])
    bonus = ChainDraftInput(bonus_tokens=torch.tensor([0]))
    batch = SimpleNamespace(reqs=[req], req_pool_indices=torch.tensor([0]), seq_lens=torch.tensor([2]), spec_info=bonus)
    with pytest.raises(AssertionError, match="request r: tokens 0 to 3 asked, 2 committed"):
        draft.draft_chain(batch, 2, wanted=torch.tensor([True]), catchup_tokens=100)


def testcatchup_plan() -> None:
    """Ordinary lags (bonus token, last draft) are free; the shortest catch-up comes first; what is left goes on."""
    starts, ends = torch.tensor([0, 8, 5, 2]), torch.tensor([20, 10, 12, 3])
    wanted = torch.tensor([True, True, True, True])
    stops, spent = catchup_plan(starts, ends, wanted, 100)
    assert (stops.tolist(), spent) == ([20, 10, 12, 3], 18 + 5)
    stops, spent = catchup_plan(starts, ends, wanted, 9)
    assert (stops.tolist(), spent) == ([4, 10, 12, 3], 9)
    stops, spent = catchup_plan(starts, ends, torch.tensor([True, False, True, True]), 0)
    assert (stops.tolist(), spent) == ([0, 8, 5, 3], 0)


def test_chain_verify_input() -> None:
    candidates = torch.tensor([[5, 6, 7], [8, 9, 10]])
    verify = chain_verify_input(candidates, torch.tensor([4, 20]))
    assert verify.draft_token.tolist() == [5, 6, 7, 8, 9, 10]
    assert verify.positions.tolist() == [4, 5, 6, 20, 21, 22]
    assert verify.retrieve_index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert verify.retrieve_next_token.tolist() == [[1, 2, -1], [1, 2, -1]]
    assert verify.retrieve_next_sibling.tolist() == [[-1, -1, -1], [-1, -1, -1]]
    assert (verify.spec_steps, verify.topk, verify.draft_token_num) == (2, 1, 3)
    assert verify.is_verify_input() and not verify.is_draft_input()


def test_draft_input_follows_batch_surgery() -> None:
    running = ChainDraftInput(bonus_tokens=torch.tensor([3, 4, 5]))
    running.filter_batch(torch.tensor([0, 2]))
    running.merge_batch(ChainDraftInput(bonus_tokens=torch.tensor([9], dtype=torch.int32)))
    assert running.bonus_tokens.tolist() == [3, 5, 9] and running.bonus_tokens.dtype == torch.int64
    assert running.is_draft_input()


def test_draft_input_with_overlap_is_where_its_tokens_will_be() -> None:
    """The bonus tokens are of the step before, and read by the scheduler from the rows of `future_indices`."""
    running, other = ChainDraftInput(bonus_tokens=torch.tensor([3])), ChainDraftInput(bonus_tokens=torch.tensor([9]))
    running.future_indices, other.future_indices = torch.tensor([11, 12, 13]), torch.tensor([21])
    running.filter_batch(torch.tensor([0, 2]), [0, 2])
    running.merge_batch(other)
    assert running.future_indices.tolist() == [11, 13, 21]

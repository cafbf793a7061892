"""Which slots hold draft KV, and how that follows a request."""

import torch

from sglang_nightjar.speculation.draft_state import DraftState

REQ_TO_TOKEN = torch.tensor([[1, 2, 3, 4, 0, 0], [1, 2, 5, 6, 7, 0]], dtype=torch.int32)  # slots 1 and 2 are shared
ROWS = torch.tensor([0, 1])


def lens(state: DraftState, *seq_lens: int) -> list[int]:
    return state.draft_lens(REQ_TO_TOKEN, ROWS, torch.tensor(seq_lens)).tolist()


def test_nothing_is_valid_at_first() -> None:
    assert lens(DraftState(8), 4, 5) == [0, 0]


def test_draft_lens_follow_marks_and_clears() -> None:
    state = DraftState(8)
    state.mark(torch.tensor([1, 2, 3, 4]))
    assert lens(state, 4, 5) == [4, 2]
    assert lens(state, 3, 1) == [3, 1]
    state.mark(torch.tensor([6, 7]))  # slot 5 before them is still missing
    assert lens(state, 4, 5) == [4, 2]
    state.mark(torch.tensor([5]))
    assert lens(state, 4, 5) == [4, 5]
    state.clear(torch.tensor([2]))  # a shared slot, so both requests lose it
    assert lens(state, 4, 5) == [1, 1]


def test_marking_and_clearing_nothing() -> None:
    state = DraftState(8)
    none = torch.empty(0, dtype=torch.int64)
    state.mark(none)
    state.clear(none)
    assert lens(state, 4, 5) == [0, 0]

"""The numba scan against its torch reference."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_nightjar.kernels.draft_lens import draft_lens, draft_lens_reference

SLOTS, ROWS, CONTEXT = 40, 5, 12


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Any validity, any slots (shared ones too), some of the rows, lengths from 0 to the whole context."""
    slot = st.integers(0, SLOTS - 1)
    invalid = draw(st.sets(slot, max_size=10))
    rows = draw(st.lists(st.integers(0, ROWS - 1), max_size=ROWS, unique=True))
    table = draw(st.lists(st.lists(slot, min_size=CONTEXT, max_size=CONTEXT), min_size=ROWS, max_size=ROWS))
    lengths = draw(st.lists(st.integers(0, CONTEXT), min_size=len(rows), max_size=len(rows)))
    valid = torch.tensor([slot not in invalid for slot in range(SLOTS)])
    return (
        valid,
        torch.tensor(table, dtype=torch.int32),
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.int64),
    )


@settings(max_examples=300, deadline=None)
@given(cases())
def test_draft_lens_equals_reference(case: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    lengths, reference = draft_lens(*case), draft_lens_reference(*case)
    assert lengths.dtype == reference.dtype == torch.int64
    assert lengths.tolist() == reference.tolist()


def test_draft_lens_stops_at_the_first_gap() -> None:
    valid = torch.tensor([False, True, True, False, True, True])
    req_to_token = torch.tensor([[1, 2, 4, 5], [2, 3, 4, 5], [3, 1, 2, 4]], dtype=torch.int32)
    rows = torch.tensor([0, 1, 2, 0, 1])
    lengths = draft_lens(valid, req_to_token, rows, torch.tensor([4, 4, 4, 0, 1]))
    assert lengths.tolist() == [4, 1, 0, 0, 1]

"""Slot bookkeeping of the CPU platform, by hand-made cases."""

import torch

from sglang_nightjar.platform.slots import assign_req_to_token_pool, extend_cache_locs, last_slots


def table() -> torch.Tensor:
    return torch.arange(100, 124, dtype=torch.int32).view(3, 8)


def test_last_slots() -> None:
    slots = last_slots(table(), torch.tensor([2, 0, 1]), torch.tensor([3, 0, 8], dtype=torch.int32))
    assert slots.tolist() == [118, -1, 115] and slots.dtype == torch.int64


def test_extend_cache_locs() -> None:
    slots = extend_cache_locs(
        req_pool_indices=torch.tensor([1, 0]),
        req_to_token=table(),
        start_offset=torch.tensor([2, 5]),
        end_offset=torch.tensor([5, 8]),
        batch_size=2,
        draft_token_num=3,
        device="cpu",
    )
    assert slots.tolist() == [110, 111, 112, 105, 106, 107] and slots.dtype == torch.int64


def test_assign_req_to_token_pool_writes_only_the_new_positions() -> None:
    rows = table()
    starts, ends = torch.tensor([1, 4, 6]), torch.tensor([3, 4, 7])
    assign_req_to_token_pool(torch.tensor([2, 0, 1]), rows, starts, ends, torch.tensor([7, 8, 9]), 3)
    expected = table()
    expected[2, 1], expected[2, 2], expected[1, 6] = 7, 8, 9
    assert torch.equal(rows, expected)

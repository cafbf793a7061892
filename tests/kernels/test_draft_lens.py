"""Draft validity: the numba and Triton scans against their torch reference, updates against a plain loop.

Triton runs in its interpreter, on a second copy of its module made for that; that it compiles for
a GPU is seen without one.
"""

import importlib.util
import mmap
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_nightjar.kernels import draft_lens_triton
from sglang_nightjar.kernels.draft_lens import draft_lens, draft_lens_reference, set_valid

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Lens = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Update = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | bool"], None]

SLOTS, ROWS, CONTEXT = 40, 5, 12
MAP_NORESERVE = 0x4000  # Linux; this Python's mmap does not name it


@cache
def interpreted() -> ModuleType:
    """`draft_lens_triton` for CPU tensors: whether a kernel is interpreted is settled where it is defined."""
    spec = importlib.util.spec_from_file_location("draft_lens_interpreted", Path(draft_lens_triton.__file__))
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(copy)
    copy.BLOCK = 4  # so that short requests take several
    return copy


def draft_lens_interpreted(
    valid: torch.Tensor, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    out = torch.full_like(seq_lens, -1, dtype=torch.int64)
    interpreted().valid_prefix(valid, req_to_token, req_pool_indices, seq_lens, out)
    return out


def set_valid_interpreted(valid: torch.Tensor, slots: torch.Tensor, seen: torch.Tensor | bool) -> None:
    interpreted().scatter_valid(valid, slots, seen)


in_every_way = pytest.mark.parametrize(
    "lens", [draft_lens_reference, draft_lens, draft_lens_interpreted], ids=["torch", "numba", "triton"]
)
updated_in_every_way = pytest.mark.parametrize("update", [set_valid, set_valid_interpreted], ids=["torch", "triton"])
index_types = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any validity, any slots (shared ones too), some of the rows, lengths from 0 to the whole context."""
    slot = st.integers(0, SLOTS - 1)
    invalid = draw(st.sets(slot, max_size=10))
    rows = draw(st.lists(st.integers(0, ROWS - 1), max_size=ROWS, unique=True))
    table = draw(st.lists(st.lists(slot, min_size=CONTEXT, max_size=CONTEXT), min_size=ROWS, max_size=ROWS))
    lengths = draw(st.lists(st.integers(0, CONTEXT), min_size=len(rows), max_size=len(rows)))
    valid = torch.tensor([slot not in invalid for slot in range(SLOTS)])
    return (
        valid,
        torch.tensor(table, dtype=draw(st.sampled_from([torch.int32, torch.int64]))),
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.int64),
    )


@pytest.mark.parametrize("lens", [draft_lens, draft_lens_interpreted], ids=["numba", "triton"])
@settings(max_examples=300, deadline=None)
@given(cases())
def test_draft_lens_equals_reference(lens: Lens, case: Case) -> None:
    lengths, reference = lens(*case), draft_lens_reference(*case)
    assert lengths.dtype == reference.dtype == torch.int64
    assert lengths.tolist() == reference.tolist()


@in_every_way
def test_draft_lens_stops_at_the_first_gap(lens: Lens) -> None:
    valid = torch.tensor([False, True, True, False, True, True])
    req_to_token = torch.tensor([[1, 2, 4, 5], [2, 3, 4, 5], [3, 1, 2, 4]], dtype=torch.int32)
    rows = torch.tensor([0, 1, 2, 0, 1])
    lengths = lens(valid, req_to_token, rows, torch.tensor([4, 4, 4, 0, 1]))
    assert lengths.tolist() == [4, 1, 0, 0, 1]


@in_every_way
@index_types
@pytest.mark.parametrize("batch", [1, 3, 130])
def test_batches_of_any_size_and_gaps_at_the_edges_of_blocks(lens: Lens, dtype: torch.dtype, batch: int) -> None:
    context = 21
    req_to_token = torch.arange(1, 1 + batch * context, dtype=dtype).view(batch, context)
    valid = torch.ones(1 + batch * context, dtype=torch.bool)
    expected = [row % (context + 1) for row in range(batch)]
    for row, length in enumerate(expected):
        if length < context:
            valid[req_to_token[row, length]] = False
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(batch))
    lengths = lens(valid, req_to_token, order, torch.full((batch,), context))
    assert lengths.tolist() == [expected[row] for row in order]


@in_every_way
@index_types
def test_offsets_beyond_32_bits(lens: Lens, dtype: torch.dtype) -> None:
    """The last of so many rows begins more than 2**32 elements into the table; hardly any of it is ever backed."""
    rows, context = 70_000, 70_000
    memory = mmap.mmap(-1, rows * context * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    req_to_token = torch.frombuffer(memory, dtype=dtype).view(rows, context)
    req_to_token[rows - 1, :9] = torch.arange(1, 10, dtype=dtype)
    valid = torch.tensor([False, *[True] * 6, False, True, True])
    row, length = torch.tensor([rows - 1], dtype=dtype), torch.tensor([9], dtype=dtype)
    assert lens(valid, req_to_token, row, length).tolist() == [6]


@st.composite
def updates(draw: st.DrawFn) -> tuple[list[bool], list[int], list[bool]]:
    valid = draw(st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS))
    slots = draw(st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=SLOTS))
    return valid, slots, draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))


@updated_in_every_way
@index_types
@settings(max_examples=60, deadline=None)
@given(updates())
def test_slots_are_marked_and_cleared_and_no_others(
    update: Update, dtype: torch.dtype, case: tuple[list[bool], list[int], list[bool]]
) -> None:
    before, slots, seen = case
    for flags in (seen, [True] * len(slots), [False] * len(slots)):
        valid, expected = torch.tensor(before), list(before)
        for slot, flag in zip(slots, flags, strict=True):
            expected[slot] = flag
        update(valid, torch.tensor(slots, dtype=dtype), torch.tensor(flags, dtype=torch.bool))
        assert valid.dtype == torch.bool and valid.tolist() == expected
    for flag in (True, False):
        valid = torch.tensor(before)
        update(valid, torch.tensor(slots, dtype=dtype), flag)
        assert valid.tolist() == [flag if slot in slots else old for slot, old in enumerate(before)]


@updated_in_every_way
def test_slots_and_flags_of_a_batch_are_updated_as_they_are(update: Update) -> None:
    valid = torch.zeros(12, dtype=torch.bool)
    slots, seen = torch.tensor([[1, 2, 3], [7, 8, 9]]), torch.tensor([[True, True, False], [True, False, False]])
    update(valid, slots, seen)
    assert valid.nonzero().flatten().tolist() == [1, 2, 7]


@updated_in_every_way
def test_updates_beyond_32_bits(update: Update) -> None:
    slots = (1 << 32) + 4096
    memory = mmap.mmap(-1, slots, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    valid = torch.frombuffer(memory, dtype=torch.bool)
    update(valid, torch.tensor([slots - 1, 5]), torch.tensor([True, True]))
    assert valid[slots - 1] and valid[5] and int(valid[:4096].sum()) == int(valid[-4096:].sum()) == 1


def test_rows_with_strides_are_refused() -> None:
    table = torch.zeros(4, 6, dtype=torch.int32).t()
    with pytest.raises(AssertionError, match=re.escape("req_to_token has strides (1, 6)")):
        draft_lens_interpreted(torch.ones(3, dtype=torch.bool), table, torch.tensor([0]), torch.tensor([2]))


@pytest.mark.parametrize("index", ["i32", "i64"])
@pytest.mark.parametrize("capability", [80, 90])
def test_triton_compiles(index: str, capability: int) -> None:
    """The scan finds its row by a 64-bit product and leaves its loop at a gap; an update is one byte a slot."""
    target = GPUTarget("cuda", capability, 32)
    types = {"valid": "*u8", "req_to_token": f"*{index}", "stride": "i32"}
    types |= {"rows": "*i64", "seq_lens": "*i64", "out": "*i64", "BLOCK": "constexpr"}
    scan = ASTSource(draft_lens_triton.leading_valid, types, constexprs={"BLOCK": draft_lens_triton.BLOCK})
    ptx = triton.compile(scan, target=target, options={"num_warps": 8}).asm["ptx"]
    assert "mul.lo.s64" in ptx and re.search(r"@%p\d+ bra", ptx)
    for each, seen in ((True, "*u8"), (False, "i32")):
        types = {"valid": "*u8", "slots": f"*{index}", "seen": seen, "count": "i32"}
        types |= {"EACH": "constexpr", "BLOCK": "constexpr"}
        constants = {"EACH": each, "BLOCK": draft_lens_triton.BLOCK}
        update = ASTSource(draft_lens_triton.store_seen, types, constexprs=constants)
        ptx = triton.compile(update, target=target, options={"num_warps": 8}).asm["ptx"]
        assert set(re.findall(r"st\.global\.(\S+)", ptx)) == {"b8"}

"""Catch-up: the numba and Triton plans and gathers against their torch references, byte for byte.

Triton runs in its interpreter, on a second copy of its module made for that; that it compiles for a GPU is
seen without one.
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

from sglang_nightjar.kernels import catchup_triton
from sglang_nightjar.kernels.catchup import (
    CatchUp,
    catchup_gather,
    catchup_gather_reference,
    catchup_plan,
    catchup_plan_reference,
)

Plan = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int], torch.Tensor]
Gather = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], CatchUp]

ROWS, CONTEXT = 7, 30
MAP_NORESERVE = 0x4000  # Linux; this Python's mmap does not name it


@cache
def interpreted() -> ModuleType:
    """`catchup_triton` for CPU tensors: whether a kernel is interpreted is settled where it is defined."""
    spec = importlib.util.spec_from_file_location("catchup_interpreted", Path(catchup_triton.__file__))
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(copy)
    copy.REQUESTS, copy.TOKENS = 2, 4  # so that small batches take several
    return copy


def plan_interpreted(
    starts: torch.Tensor, ends: torch.Tensor, wanted: torch.Tensor, budget: int, ordinary: int
) -> torch.Tensor:
    stops = torch.full_like(starts, -1)
    interpreted().plan(starts, ends, wanted, budget, ordinary, stops)
    return stops


def gather_interpreted(
    history: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    capacity: int,
) -> CatchUp:
    tokens, positions, slots = torch.full((3, capacity), -1)
    found = CatchUp(tokens, positions, slots, torch.full((len(starts) + 1,), -1))
    interpreted().gather(history, req_to_token, rows, starts, stops, found)
    return found


planned_in_every_way = pytest.mark.parametrize(
    "plan", [catchup_plan_reference, catchup_plan, plan_interpreted], ids=["torch", "numba", "triton"]
)
gathered_in_every_way = pytest.mark.parametrize(
    "gather", [catchup_gather_reference, catchup_gather, gather_interpreted], ids=["torch", "numba", "triton"]
)
index_types = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])


@st.composite
def lagging(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Starts, ends and who is wanted; lags from none to far beyond any budget, equal ones too."""
    count = draw(st.integers(0, ROWS))
    lags = draw(st.lists(st.integers(0, 12), min_size=count, max_size=count))
    starts = draw(st.lists(st.integers(0, CONTEXT - 12), min_size=count, max_size=count))
    wanted = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    first = torch.tensor(starts, dtype=torch.int64)
    return first, first + torch.tensor(lags, dtype=torch.int64), torch.tensor(wanted, dtype=torch.bool)


@pytest.mark.parametrize("plan", [catchup_plan, plan_interpreted], ids=["numba", "triton"])
@settings(max_examples=200, deadline=None)
@given(batch=lagging(), budget=st.integers(0, 40), ordinary=st.integers(0, 3))
def test_plans_equal_the_reference(plan: Plan, batch: tuple[torch.Tensor, ...], budget: int, ordinary: int) -> None:
    starts, ends, wanted = batch
    stops = plan(starts, ends, wanted, budget, ordinary)
    expected = catchup_plan_reference(starts, ends, wanted, budget, ordinary)
    assert stops.dtype == expected.dtype and torch.equal(stops, expected)


@settings(deadline=None)
@given(batch=lagging(), budget=st.integers(0, 40), ordinary=st.integers(0, 3))
def test_the_budget_is_kept_and_not_wasted(batch: tuple[torch.Tensor, ...], budget: int, ordinary: int) -> None:
    starts, ends, wanted = batch
    stops = catchup_plan_reference(starts, ends, wanted, budget, ordinary)
    assert torch.equal(stops[~wanted], starts[~wanted])
    assert bool((stops >= starts).all()) and bool((stops <= ends).all())
    behind = (ends - starts - ordinary).clamp(min=0)[wanted]
    whole = stops[wanted] == ends[wanted]
    spent = int(torch.where(whole, behind, stops[wanted] - starts[wanted]).sum())
    assert spent == min(budget, int(behind.sum()))
    assert int((~whole & (stops[wanted] > starts[wanted])).sum()) <= 1, "at most one is read in part"
    if bool((~whole).any()) and bool(whole.any()):
        assert int(behind[whole].max()) <= int(behind[~whole].min()), "who lags least comes first"


@settings(deadline=None)
@given(batch=lagging(), budget=st.integers(0, 40))
def test_the_plan_is_the_one_the_cpu_worker_follows(batch: tuple[torch.Tensor, ...], budget: int) -> None:
    from sglang_nightjar.speculation.reading import ORDINARY_LAG, catchup_plan

    starts, ends, wanted = batch
    stops = catchup_plan_reference(starts, ends, wanted, budget, ORDINARY_LAG)
    assert torch.equal(stops, catchup_plan(starts, ends, wanted, budget)[0])


@planned_in_every_way
def test_a_plan_in_words(plan: Plan) -> None:
    starts = torch.tensor([10, 20, 30, 40, 50])
    ends = torch.tensor([12, 29, 34, 49, 54])  # beyond the ordinary 2: 0, 7, 2, 7, 2
    wanted = torch.tensor([True, True, True, True, False])
    assert plan(starts, ends, wanted, 6, 2).tolist() == [12, 24, 34, 40, 50]


@pytest.mark.parametrize("gather", [catchup_gather, gather_interpreted], ids=["numba", "triton"])
@index_types
@settings(max_examples=100, deadline=None)
@given(data=st.data(), batch=lagging(), spare=st.integers(0, 9), seed=st.integers(0, 2**31))
def test_gathers_equal_the_reference(
    gather: Gather, dtype: torch.dtype, data: st.DataObject, batch: tuple[torch.Tensor, ...], spare: int, seed: int
) -> None:
    starts, stops, _ = batch
    generator = torch.Generator().manual_seed(seed)
    history, req_to_token = (
        torch.randint(0, 2**31 - 1, (ROWS, CONTEXT), generator=generator).to(dtype) for _ in range(2)
    )
    order = data.draw(st.permutations(range(ROWS)))
    rows = torch.tensor(order[: len(starts)], dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    capacity = int((stops - starts).sum()) + spare
    found = gather(history, req_to_token, rows, starts, stops, capacity)
    expected = catchup_gather_reference(history, req_to_token, rows, starts, stops, capacity)
    for name in CatchUp.__dataclass_fields__:
        assert getattr(found, name).dtype == torch.int64
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@gathered_in_every_way
def test_a_gather_in_words(gather: Gather) -> None:
    history = torch.arange(100, 130, dtype=torch.int32).view(3, 10)
    req_to_token = torch.arange(500, 530, dtype=torch.int32).view(3, 10)
    found = gather(history, req_to_token, torch.tensor([2, 0, 1]), torch.tensor([7, 0, 4]), torch.tensor([10, 0, 6]), 7)
    assert found.tokens.tolist() == [127, 128, 129, 114, 115, 0, 0]
    assert found.positions.tolist() == [7, 8, 9, 4, 5, 0, 0]
    assert found.slots.tolist() == [527, 528, 529, 514, 515, 0, 0]
    assert found.query_start.tolist() == [0, 3, 3, 5]


@gathered_in_every_way
def test_nothing_to_read(gather: Gather) -> None:
    table = torch.zeros((2, 4), dtype=torch.int32)
    found = gather(table, table, torch.tensor([1]), torch.tensor([3]), torch.tensor([3]), 0)
    assert not len(found.tokens) and found.query_start.tolist() == [0, 0]


@gathered_in_every_way
@index_types
def test_offsets_beyond_32_bits(gather: Gather, dtype: torch.dtype) -> None:
    """The last row begins more than 2**32 elements into both tables; hardly any of them is ever backed."""
    rows, context = 70_000, 70_000
    nbytes = rows * context * dtype.itemsize
    tables = [
        torch.frombuffer(
            mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE), dtype=dtype
        ).view(rows, context)
        for _ in range(2)
    ]
    for index, table in enumerate(tables):
        table[rows - 1, context - 5 :] = torch.arange(5, dtype=dtype) + 10 * index + 1
    last = torch.tensor([rows - 1], dtype=dtype)
    found = gather(*tables, last, torch.tensor([context - 4]), torch.tensor([context]), 4)
    assert found.tokens.tolist() == [2, 3, 4, 5] and found.slots.tolist() == [12, 13, 14, 15]


def test_what_does_not_fit_is_named() -> None:
    table = torch.zeros((2, 9), dtype=torch.int32)
    with pytest.raises(AssertionError, match="5 tokens to read, room for 4"):
        catchup_gather(table, table, torch.tensor([0]), torch.tensor([1]), torch.tensor([6]), 4)
    with pytest.raises(AssertionError, match="a budget of -1 tokens"):
        catchup_plan(torch.tensor([0]), torch.tensor([1]), torch.tensor([True]), -1, 2)
    with pytest.raises(AssertionError, match=re.escape("history has strides (1, 9)")):
        gather_interpreted(
            torch.zeros((4, 9), dtype=torch.int32).t(),
            table,
            torch.tensor([0]),
            torch.tensor([0]),
            torch.tensor([1]),
            1,
        )


def test_what_is_beyond_the_capacity_is_left_out_and_harms_nothing() -> None:
    """On a GPU nobody looks; the kernel must not write outside."""
    table = torch.arange(1, 11, dtype=torch.int32).view(1, 10)
    memory = torch.full((3, 16), -1)
    found = CatchUp(memory[0, :6], memory[1, :6], memory[2, :6], torch.full((2,), -1))
    interpreted().gather(table, table, torch.tensor([0]), torch.tensor([0]), torch.tensor([10]), found)
    assert found.tokens.tolist() == [1, 2, 3, 4, 5, 6] and bool((memory[:, 6:] == -1).all())


@pytest.mark.parametrize("index", ["i32", "i64"])
@pytest.mark.parametrize("capability", [80, 90])
def test_triton_compiles(index: str, capability: int) -> None:
    """Rows are found by 64-bit products; tokens and slots are read in their own width and written as 8 bytes."""
    target = GPUTarget("cuda", capability, 32)
    sizes = {"REQUESTS": catchup_triton.REQUESTS, "TOKENS": catchup_triton.TOKENS}
    types = {"starts": "*i64", "ends": "*i64", "wanted": "*u8", "stops": "*i64"}
    types |= {"budget": "i32", "ordinary": "i32", "count": "i32", "REQUESTS": "constexpr"}
    source = ASTSource(catchup_triton.share_budget, types, constexprs={"REQUESTS": sizes["REQUESTS"]})
    ptx = triton.compile(source, target=target).asm["ptx"]
    assert set(re.findall(r"st\.global\.(\S+)", ptx)) == {"b64"}
    names = ("rows", "starts", "stops", "tokens", "positions", "slots", "query_start")
    types = {"history": f"*{index}", "req_to_token": f"*{index}"} | dict.fromkeys(names, "*i64")
    types |= {"history_stride": "i32", "slots_stride": "i32", "count": "i32", "capacity": "i32"}
    source = ASTSource(catchup_triton.list_tokens, types | dict.fromkeys(sizes, "constexpr"), constexprs=sizes)
    ptx = triton.compile(source, target=target).asm["ptx"]
    assert "mul.lo.s64" in ptx and {kind[-3:] for kind in re.findall(r"st\.global\.(\S+)", ptx)} == {"b64"}

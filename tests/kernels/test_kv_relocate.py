"""Moving KV slots: the torch reference against single rows, the numba and Triton kernels against the reference.

Triton runs in its interpreter, on a second copy of its module made for that; what it compiles to
for a GPU is looked at without one.
"""

import importlib.util
import mmap
import re
from collections.abc import Callable
from dataclasses import dataclass
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

from sglang_nightjar.kernels import kv_relocate as module
from sglang_nightjar.kernels import kv_relocate_triton
from sglang_nightjar.kernels.kv_relocate import expand_pages, kv_relocate, relocate_reference

Relocate = Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor], None]

MAP_NORESERVE = 0x4000  # Linux; this Python's mmap does not name it

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]
SHAPES = [(1,), (3,), (8,), (2, 8), (3, 5), (1, 2, 3), (4, 32), (1101,)]


@cache
def interpreted() -> ModuleType:
    """`kv_relocate_triton` for CPU tensors: whether a kernel is interpreted is settled where it is defined."""
    spec = importlib.util.spec_from_file_location("kv_relocate_interpreted", Path(kv_relocate_triton.__file__))
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(copy)
    return copy


def kv_relocate_interpreted(buffers: list[torch.Tensor], src: torch.Tensor, dst: torch.Tensor) -> None:
    """`kv_relocate` as it is for CUDA tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "mover", lambda device: interpreted().move_rows)
        kv_relocate(buffers, src, dst)


in_every_way = pytest.mark.parametrize(
    "relocate", [relocate_reference, kv_relocate, kv_relocate_interpreted], ids=["torch", "numba", "triton"]
)


@dataclass
class Layout:
    """A buffer's rows, how far apart they are and where in its memory it begins, in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    gap: int
    offset: int

    def make(self, slots: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """All the memory as bytes, and the buffer in it."""
        row = torch.Size(self.shape).numel()
        elements = self.offset + slots * (row + self.gap)
        memory = torch.randint(0, 256, (elements * self.dtype.itemsize,), dtype=torch.uint8, generator=generator)
        rows = memory.view(self.dtype)[self.offset :].view(slots, row + self.gap)[:, :row]
        return memory, rows.unflatten(1, self.shape)


LAYOUTS = st.builds(
    Layout,
    st.sampled_from(DTYPES),
    st.sampled_from(SHAPES),
    st.sampled_from([0, 0, 1, 16]),
    st.sampled_from([0, 1, 16]),
)


@st.composite
def moves(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    """Number of slots, sources and targets: a contraction, any moves at all, or a permutation (chains and cycles)."""
    slots = draw(st.integers(1, 20))
    order = draw(st.permutations(range(slots)))
    kind = draw(st.sampled_from(["contraction", "any", "permutation"]))
    if kind == "contraction":
        ceiling = slots // 2
        targets, sources = [s for s in order if s < ceiling], [s for s in order if s >= ceiling]
        count = draw(st.integers(0, ceiling))
        return slots, sources[:count], targets[:count]
    if kind == "permutation":
        return slots, list(order), list(range(slots))
    targets = list(order[: draw(st.integers(0, slots))])
    return slots, [draw(st.integers(0, slots - 1)) for _ in targets], targets


@in_every_way
@settings(max_examples=120, deadline=None)
@given(st.lists(LAYOUTS, max_size=4), moves(), st.integers(0, 2**31))
def test_rows_move_and_nothing_else_changes(
    relocate: Relocate, layouts: list[Layout], case: tuple[int, list[int], list[int]], seed: int
) -> None:
    slots, src, dst = case
    found = [layout.make(slots, torch.Generator().manual_seed(seed + i)) for i, layout in enumerate(layouts)]
    expected = [layout.make(slots, torch.Generator().manual_seed(seed + i)) for i, layout in enumerate(layouts)]
    relocate(
        [buffer for _, buffer in found], torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64)
    )
    for (memory, buffer), (expected_memory, rows) in zip(found, expected, strict=True):
        before = [row.clone() for row in rows]
        for source, target in zip(src, dst, strict=True):
            rows[target] = before[source]
        assert torch.equal(memory, expected_memory), f"{buffer.dtype} {list(buffer.shape)} {buffer.stride()}"


@in_every_way
def test_chains_and_cycles(relocate: Relocate) -> None:
    buffer = torch.arange(8).float().repeat_interleave(6).view(8, 2, 3)
    src, dst = torch.tensor([0, 1, 2, 5, 6, 7, 7]), torch.tensor([1, 2, 3, 6, 5, 7, 0])
    relocate([buffer], src, dst)
    assert buffer[:, 0, 0].tolist() == [7, 0, 1, 2, 4, 6, 5, 7]
    assert torch.equal(buffer, buffer[:, :1, :1].expand_as(buffer))


@in_every_way
def test_offsets_beyond_32_bits(relocate: Relocate) -> None:
    row, slots = 4096, 1_200_000  # 4.9 GB of addresses, of which two pages are ever backed
    memory = mmap.mmap(-1, row * slots, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8).view(slots, row)
    buffer[slots - 1] = torch.arange(row) % 251
    relocate([buffer], torch.tensor([slots - 1]), torch.tensor([1]))
    assert torch.equal(buffer[1], buffer[slots - 1]) and buffer[1].any()


@in_every_way
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_move_as_their_slots_and_as_rows_of_a_paged_view(relocate: Relocate, page_size: int) -> None:
    generator = torch.Generator().manual_seed(page_size)
    by_slot = [torch.randn(10 * page_size, 2, 8, generator=generator) for _ in range(4)]
    by_page = [buffer.clone() for buffer in by_slot]
    src_pages, dst_pages = torch.tensor([9, 5, 8]), torch.tensor([2, 1, 4])
    src, dst = expand_pages(src_pages, dst_pages, page_size)
    assert src.tolist() == [page * page_size + i for page in (9, 5, 8) for i in range(page_size)]
    assert dst.tolist() == [page * page_size + i for page in (2, 1, 4) for i in range(page_size)]
    before = by_slot[0].clone()
    relocate(by_slot, src, dst)
    relocate([buffer.unflatten(0, (-1, page_size)) for buffer in by_page], src_pages, dst_pages)
    assert all(torch.equal(a, b) for a, b in zip(by_slot, by_page, strict=True))
    assert torch.equal(by_slot[0][page_size : 2 * page_size], before[5 * page_size : 6 * page_size])


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([5, 6, 7, 8], [1, 2, 1, 1], "dst has 4 slots but 2 different ones; slot 1 is there 3 times"),
        ([5, 10], [1, 2], "src is from 5 to 10; buffer 1 has 10 slots"),
        ([5], [-1], "dst is from -1 to -1; buffer 0 has 12 slots"),
        ([5, 6], [1], "src has 2 slots and dst 1"),
        ([5.0], [1], "src is torch.float32 [1], not int64 [n]"),
        ([[5]], [1], "src is torch.int64 [1, 1], not int64 [n]"),
    ],
)
def test_moves_that_do_not_fit_are_named_and_nothing_moves(src: list[int], dst: list[int], message: str) -> None:
    buffers = [torch.randn(12, 4), torch.randn(10, 4)]
    before = [buffer.clone() for buffer in buffers]
    with pytest.raises(AssertionError, match=re.escape(message)):
        kv_relocate(buffers, torch.tensor(src), torch.tensor(dst))
    assert all(torch.equal(a, b) for a, b in zip(buffers, before, strict=True))


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(8, 4, 6).transpose(1, 2), "buffer 1 has rows [6, 4] of strides (1, 6)"),
        (torch.zeros(8), "buffer 1 is [8], not [slots, ...row]"),
        (torch.zeros(8, 4, device="meta"), "buffer 1 is on meta, buffer 0 on cpu"),
    ],
)
def test_buffers_that_do_not_fit_are_named(buffer: torch.Tensor, message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        kv_relocate([torch.zeros(8, 4), buffer], torch.tensor([5]), torch.tensor([1]))


def test_other_devices_are_refused() -> None:
    with pytest.raises(AssertionError, match="buffers are on meta; KV slots can be moved on cpu and cuda"):
        kv_relocate([torch.zeros(8, 4, device="meta")], torch.tensor([5]), torch.tensor([1]))


@pytest.mark.parametrize(
    ("word", "align", "access"), [(8, 16, "v2.b64"), (8, 8, "b64"), (4, 4, "b32"), (2, 2, "b16"), (1, 1, "b8")]
)
@pytest.mark.parametrize("capability", [80, 90])
def test_triton_compiles_to_the_widest_access_the_alignment_allows(
    word: int, align: int, access: str, capability: int
) -> None:
    types = {"table": "*i64", "src": "*i64", "dst": "*i64", "moves": "i32"}
    constants = {"WORD": kv_relocate_triton.WORDS[word], "ALIGN": align, "MOVES": 4, "BLOCK": 256}
    signature = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kv_relocate_triton.copy_rows, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    stores = set(re.findall(r"st\.global\.(\S+)", compiled.asm["ptx"]))
    assert stores == {access}

"""The CUDA side of `kv_relocate`: one launch for all moves of all buffers.

Roofline. A call reads and writes every row once, 2 x moves x row bytes x buffers, and nothing else that
counts (24 bytes a buffer, 16 a move). At the 4.8 TB/s of an H200's memory (a copy there reaches some 4.3): 10,000
slots of 32 layers, K and V, with rows of 2 KiB are 2.6 GB and 0.55 ms; in fp8, half of both. It is bound by
bandwidth from about 100 such slots on (27 MB, 5.5 us); below that, by the launch and the two small copies of its
arguments. Rows of 16-byte multiples move in 16-byte accesses; any other alignment in the widest it allows.

No order among the moves is needed: those whose source is also a target have gone before, through a temporary
(`kv_relocate`), and what is left reads no row that any of them writes.
"""

import math

import torch
import triton
import triton.language as tl

WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
TILE = 1024  # words a program holds at once: 8 KiB of 8-byte words, four 16-byte accesses a thread


@triton.jit(do_not_specialize=["moves"])
def copy_rows(
    table, src, dst, moves, WORD: tl.constexpr, ALIGN: tl.constexpr, MOVES: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (i, b) makes the i-th MOVES moves in buffer b, BLOCK words of each row at a time.

    The hints say what the compiler cannot know of addresses it finds in a table: with ALIGN of 16
    and 8-byte words a thread reads and writes two at once.
    """
    entry = table + tl.program_id(1) * 3
    address = tl.load(entry)
    stride = tl.load(entry + 1)
    words = tl.multiple_of(tl.load(entry + 2) // WORD.itemsize, ALIGN // WORD.itemsize)
    move = tl.program_id(0) * MOVES + tl.arange(0, MOVES)
    live = move < moves
    source = address + tl.load(src + move, mask=live, other=0) * stride
    target = address + tl.load(dst + move, mask=live, other=0) * stride
    source = tl.multiple_of(source.to(tl.pointer_type(WORD)), ALIGN)[:, None]
    target = tl.multiple_of(target.to(tl.pointer_type(WORD)), ALIGN)[:, None]
    for start in range(0, words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        mask = live[:, None] & (word < words)[None, :]
        value = tl.load(source + word[None, :], mask=mask)
        tl.store(target + word[None, :], value, mask=mask)


def move_rows(table: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, device: torch.device) -> None:
    """`row_table`, int64 [n] sources and targets, all on the CPU; the rows they name are on `device`."""
    align = math.gcd(16, *table.flatten().tolist())
    word = min(align, 8)
    block = min(triton.next_power_of_2(int(table[:, 2].max()) // word), TILE)
    per_program = TILE // block
    grid = (triton.cdiv(len(src), per_program), len(table))
    arguments = (table.to(device), src.to(device), dst.to(device), len(src))
    copy_rows[grid](*arguments, WORD=WORDS[word], ALIGN=align, MOVES=per_program, BLOCK=block)

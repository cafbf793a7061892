"""K and V buffers that resize in place under SGLang's own pool interface."""

from typing import Any

import pytest
import torch
from arena_kinds import Place

from sglang_nightjar.memory.elastic_pool import ElasticKVPool

LAYERS, HEADS, DIM = 3, 2, 16
SLOT_BYTES = 2 * LAYERS * HEADS * DIM * 4


def make(place: Place, size: int, page_size: int, spare_bytes: int) -> Any:
    return ElasticKVPool.with_spare(spare_bytes, 0, place.memory)(
        size=size,
        page_size=page_size,
        dtype=torch.float32,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


@pytest.mark.parametrize("page_size", [1, 16])
def test_growing_moves_nothing_and_keeps_what_is_there(place: Place, page_size: int) -> None:
    """The memory it grows into is what a draft gives up."""
    pool = make(place, 64, page_size, 1 << 20)
    draft = place.memory.arena(1 << 20)
    draft.commit(0, draft.size)
    place.fill()
    addresses = [buffer.data_ptr() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    for layer in range(LAYERS):
        pool.k_buffer[layer][: 64 + page_size] = layer + 1
    before = pool.nbytes
    larger = pool.slots_for(before + (1 << 20)) // page_size * page_size
    assert larger > 64 + ((1 << 20) - 2 * LAYERS * place.memory.granularity) // SLOT_BYTES - page_size
    draft.decommit(0, draft.size)
    pool.resize(larger)
    pool.resized(larger)
    assert pool.size == larger and pool.nbytes == pool.bytes_for(larger) <= before + (1 << 20)
    assert addresses == [buffer.data_ptr() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    for layer in range(LAYERS):
        assert (pool.k_buffer[layer][: 64 + page_size] == layer + 1).all()
        pool.v_buffer[layer][larger + page_size - 1] = 7.0  # the last slot has memory
    pool.resize(64)
    assert pool.nbytes == before and (pool.k_buffer[0][: 64 + page_size] == 1).all()
    draft.commit(0, draft.size)
    place.check_handed_over()


def test_all_of_it_can_be_given_back(place: Place) -> None:
    pool = make(place, 64, 1, 0)
    pool.resize(0)
    assert pool.nbytes == pool.bytes_for(0) == 0
    pool.resize(64)
    assert (pool.k_buffer[0][:65] == 0).all()


def test_upstream_reads_and_writes_it(place: Place) -> None:
    pool = make(place, 64, 1, 0)

    class Layer:
        layer_id = 1

    slots = torch.tensor([3, 9])
    k, v = torch.randn(2, HEADS, DIM), torch.randn(2, HEADS, DIM)
    pool.set_kv_buffer(Layer(), slots, k, v)
    assert torch.equal(pool.get_key_buffer(1)[slots], k) and torch.equal(pool.get_value_buffer(1)[slots], v)
    assert sum(pool.get_kv_size_bytes()) == pool.nbytes

"""What differs between the elastic pool of a GPU and the host's, over the fake device."""

from typing import Any

import pytest
import torch
from cuda_world import device_on
from fake_cuda import FakeCuda

from sglang_nightjar.errors import UserError
from sglang_nightjar.memory import elastic_pool_cuda
from sglang_nightjar.memory.elastic_pool_cuda import CudaElasticKVPool


def make(cuda: FakeCuda, page_size: int = 1, **more: Any) -> Any:
    return CudaElasticKVPool.with_spare(1 << 20, 0, device_on(cuda))(
        size=64,
        page_size=page_size,
        dtype=torch.float32,
        head_num=2,
        head_dim=16,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
        **more,
    )


def test_the_bound_of_a_store_is_that_of_the_largest_pool(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph keeps the bound it was captured with, so it must hold after the pool has grown."""
    bounds: list[int] = []
    real = elastic_pool_cuda._set_kv_buffer_impl

    def store(*args: Any, size_limit: int, **more: Any) -> None:
        bounds.append(size_limit)
        real(*args, size_limit=size_limit, **more)

    monkeypatch.setattr(elastic_pool_cuda, "_set_kv_buffer_impl", store)
    pool = make(cuda)
    slots, k, v = torch.tensor([3, 9]), torch.randn(2, 2, 16), torch.randn(2, 2, 16)
    pool._store_kv_layer(1, slots, k, v)
    larger = pool.slots_for(pool.nbytes + (1 << 20))
    pool.resize(larger)
    pool.resized(larger)
    pool._store_kv_layer(1, slots + larger - 9, k, v)
    assert bounds[0] == bounds[1] >= larger + pool.page_size > 64 + pool.page_size
    assert torch.equal(pool.k_buffer[1][slots + larger - 9], k) and torch.equal(pool.v_buffer[1][slots], v)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_buffers_are_whole_pages(cuda: FakeCuda, page_size: int) -> None:
    """FlashAttention views a buffer as [pages, page size, ...]."""
    pool = make(cuda, page_size)
    assert len(pool.k_buffer[0]) % page_size == 0


def test_other_layouts_are_refused(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"):
        make(cuda, post_capture_active=True)

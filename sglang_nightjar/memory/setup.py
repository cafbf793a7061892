"""Puts the elastic memory of a rank together, once its models are loaded and its pools made."""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from sglang_nightjar.kernels.kv_relocate import kv_relocate
from sglang_nightjar.memory.draft_store import DraftStore
from sglang_nightjar.memory.elastic_pool import ElasticKVPool
from sglang_nightjar.memory.ledger import Account, Ledger
from sglang_nightjar.memory.relocate import Holders, contract
from sglang_nightjar.memory.residency import DraftResidency, PoolSizes

logger = logging.getLogger(__name__)

_COPIES_OF_TARGET = 2  # the plain weights and the prepacked ones
_TRIAL_SLOTS = 64  # moved once, while the pool is empty, to know what moving costs


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters."""
    return sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())


def build_residency(
    *,
    target: Any,
    draft: Any,
    store: DraftStore,
    capacity: int | None,
    chunk_bytes: int,
    holders: Callable[[], Holders],
    on_capacity: Callable[[int], None],
    on_draft_lost: Callable[[], None],
) -> DraftResidency:
    """Charges what is there to a new ledger and works out the larger pool.

    Args:
        target, draft: SGLang's model runners, with `ElasticKVPool`s.
        capacity: bytes of this rank's device; None: what is in use now.
        holders: of KV slots; asked for when the pool is to shrink.
        on_capacity, on_draft_lost: as in `DraftResidency`.
    """
    target_pool, draft_pool = target.token_to_kv_pool, draft.token_to_kv_pool
    assert isinstance(target_pool, ElasticKVPool) and isinstance(draft_pool, ElasticKVPool), (
        f"pools are {type(target_pool).__name__} and {type(draft_pool).__name__}, not elastic"
    )
    allocator = target.token_to_kv_pool_allocator
    uses = {
        Account.TARGET_WEIGHTS: _COPIES_OF_TARGET * weight_bytes(target.model),
        Account.TARGET_KV: target_pool.nbytes,
        Account.DRAFT_WEIGHTS: store.nbytes,
        Account.DRAFT_KV: draft_pool.nbytes,
    }
    ledger = Ledger(max(sum(uses.values()), capacity or 0))
    ledger.transfer(uses)
    room = ledger.free + target_pool.nbytes + store.nbytes + draft_pool.nbytes
    sizes = PoolSizes(small=allocator.size, large=target_pool.slots_for(room))
    logger.info(
        "without the draft the KV pool has %d slots, with it %d; its weights alone would make %d",
        sizes.large,
        sizes.small,
        target_pool.slots_for(target_pool.nbytes + store.nbytes),
    )
    buffers = [*target_pool.k_buffer, *target_pool.v_buffer]
    return DraftResidency(
        ledger=ledger,
        store=store,
        target_pool=target_pool,
        draft_pool=draft_pool,
        allocator=allocator,
        sizes=sizes,
        chunk_bytes=chunk_bytes,
        shrink=lambda limit, keep_cached: contract(
            limit,
            allocator=allocator,
            holders=holders(),
            req_to_token=target.req_to_token_pool.req_to_token,
            buffers=buffers,
            keep_cached=keep_cached,
        ),
        on_capacity=on_capacity,
        on_draft_lost=on_draft_lost,
    )


def time_moving(pool: ElasticKVPool) -> float:
    """Seconds to move one slot of an empty pool; the second time, since the first compiles."""
    count = min(_TRIAL_SLOTS, pool.size // 2)
    src = torch.arange(1, count + 1)
    seconds = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        kv_relocate([*pool.k_buffer, *pool.v_buffer], src, src + count)
        seconds = time.perf_counter() - begin
    return seconds / count

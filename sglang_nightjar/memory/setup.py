"""Puts the elastic memory of a rank together, once its models are loaded and its pools made."""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from sglang_nightjar.kernels.kv_relocate import kv_relocate
from sglang_nightjar.memory.draft_store import DraftStore
from sglang_nightjar.memory.elastic_pool import ElasticBuffers
from sglang_nightjar.memory.ledger import Account, Ledger
from sglang_nightjar.memory.pools import PoolSizes
from sglang_nightjar.memory.relocate import Contraction, Holders, contract
from sglang_nightjar.memory.residency import DraftResidency

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
    target_bytes: int | None = None,
    workspace_bytes: int = 0,
    on_moved: Callable[[int, float], None] | None = None,
    holders: Callable[[], Holders],
    on_capacity: Callable[[int], None],
    on_draft_lost: Callable[[], None],
    finish_step: Callable[[], None],
    clock: Callable[[], float],
) -> DraftResidency:
    """Charges what is there to a new ledger and works out the larger pool.

    Args:
        target, draft: SGLang's model runners, with elastic pools.
        capacity: bytes of this rank's device; None: what is in use now.
        target_bytes: what the target's weights take; None: twice their size, since the plain ones stay.
        workspace_bytes: held for good besides weights and KV, such as CUDA graphs and what they read.
        on_moved: called with the KV slots that a contraction has moved, and when it began (`time.perf_counter`).
        holders: of KV slots; asked for when the pool is to shrink.
        on_capacity, on_draft_lost, clock: as in `DraftResidency`. finish_step: as in `contract`.
    """
    target_pool, draft_pool = target.token_to_kv_pool, draft.token_to_kv_pool
    assert isinstance(target_pool, ElasticBuffers) and isinstance(draft_pool, ElasticBuffers), (
        f"pools are {type(target_pool).__name__} and {type(draft_pool).__name__}, not elastic"
    )
    allocator = target.token_to_kv_pool_allocator
    if target_bytes is None:
        target_bytes = _COPIES_OF_TARGET * weight_bytes(target.model)
    uses = {
        Account.TARGET_WEIGHTS: target_bytes,
        Account.TARGET_KV: target_pool.nbytes,
        Account.DRAFT_WEIGHTS: store.nbytes,
        Account.DRAFT_KV: draft_pool.nbytes,
        Account.WORKSPACE: workspace_bytes,
    }
    ledger = Ledger(max(sum(uses.values()), capacity or 0))
    ledger.transfer(uses)
    room = ledger.free + target_pool.nbytes + store.nbytes + draft_pool.nbytes
    sizes = PoolSizes(
        small=allocator.size,
        large=target_pool.slots_for(room),
        weights_only=target_pool.slots_for(target_pool.nbytes + store.nbytes),
    )
    logger.info(
        "without the draft the KV pool has %d slots, with it %d; its weights alone would make %d",
        sizes.large,
        sizes.small,
        sizes.weights_only,
    )
    buffers = [*target_pool.k_buffer, *target_pool.v_buffer]

    def shrink(limit: int, keep_cached: bool) -> Contraction:
        began = time.perf_counter()
        done = contract(
            limit,
            allocator=allocator,
            holders=holders(),
            req_to_token=target.req_to_token_pool.req_to_token,
            buffers=buffers,
            keep_cached=keep_cached,
            finish_step=finish_step,
        )
        if on_moved is not None:
            on_moved(done.moved, began)
        return done

    return DraftResidency(
        ledger=ledger,
        store=store,
        target_pool=target_pool,
        draft_pool=draft_pool,
        allocator=allocator,
        sizes=sizes,
        chunk_bytes=chunk_bytes,
        shrink=shrink,
        on_capacity=on_capacity,
        on_draft_lost=on_draft_lost,
        before_work=store.device.mark,
        clock=clock,
    )


def time_moving(pool: ElasticBuffers) -> float:
    """Seconds to move one slot of an empty pool; the second time, since the first compiles."""
    count = min(_TRIAL_SLOTS, pool.size // 2)
    src = torch.arange(1, count + 1)
    seconds = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        kv_relocate([*pool.k_buffer, *pool.v_buffer], src, src + count)
        if pool.k_buffer[0].is_cuda:
            torch.cuda.current_stream(pool.k_buffer[0].device).synchronize()
        seconds = time.perf_counter() - begin
    return seconds / count

"""A rank's elastic memory put together from SGLang's parts: what is charged, and how large the larger pool is."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from arena_kinds import Place

from sglang_nightjar.coordination.messages import Turn
from sglang_nightjar.memory.draft_store import DraftStore
from sglang_nightjar.memory.elastic_pool import ElasticKVPool
from sglang_nightjar.memory.elastic_pool_cuda import CudaElasticKVPool
from sglang_nightjar.memory.relocate import Contraction
from sglang_nightjar.memory.residency import DraftResidency
from sglang_nightjar.memory.setup import build_residency, weight_bytes

SLOTS = 64


def model(width: int) -> torch.nn.Module:
    return torch.nn.Linear(width, width, bias=False)


class Allocator:
    size = SLOTS

    def grow(self, size: int) -> None:
        self.size = size

    def shrink(self, size: int) -> None:
        self.size = size


def rank(place: Place, workspace_bytes: int) -> tuple[DraftResidency, Any, Any, DraftStore]:
    """A target and its draft, as after SGLang's start; over the fake device with a GPU's pools."""
    target_model, draft_model = model(64), model(256)
    store = DraftStore(draft_model, place.memory, shared_with=target_model)
    kind = ElasticKVPool if place.cuda is None else CudaElasticKVPool

    def runner(layers: int, own: torch.nn.Module) -> Any:
        pool = kind.with_spare(store.nbytes, 0, place.memory)(
            size=SLOTS, page_size=1, dtype=torch.float32, head_num=2, head_dim=16, layer_num=layers,
            device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        return SimpleNamespace(
            model=own,
            token_to_kv_pool=pool,
            token_to_kv_pool_allocator=Allocator(),
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros((2, 8), dtype=torch.int32)),
        )

    target, draft = runner(3, target_model), runner(1, draft_model)
    residency = build_residency(
        target=target,
        draft=draft,
        store=store,
        capacity=None,
        chunk_bytes=1 << 16,
        target_bytes=weight_bytes(target_model),
        workspace_bytes=workspace_bytes,
        holders=lambda: pytest.fail("nothing is to be moved"),
        on_capacity=lambda slots: None,
        on_draft_lost=lambda: None,
        finish_step=lambda: None,
        clock=time.perf_counter,
    )
    residency._shrink = lambda limit, keep: Contraction()
    return residency, target, draft, store


def bytes_by_account(residency: DraftResidency) -> dict[str, int]:
    found: dict[str, int] = residency.report()["device_bytes"]
    return found


def test_graphs_are_charged_and_leave_the_larger_pool_what_it_is(place: Place) -> None:
    """What they hold stays held, so it neither makes room nor takes any."""
    plain, target, draft, store = rank(place, 0)
    with_graphs, *_ = rank(place, 12_345)
    held = bytes_by_account(with_graphs)
    assert (held["workspace"], held["free"]) == (12_345, 0)
    assert held["capacity"] == bytes_by_account(plain)["capacity"] + 12_345
    assert (held["target_kv"], held["draft_kv"]) == (target.token_to_kv_pool.nbytes, draft.token_to_kv_pool.nbytes)
    assert (held["target_weights"], held["draft_weights"]) == (64 * 64 * 4, store.nbytes)
    assert with_graphs.sizes == plain.sizes and with_graphs.sizes.large > with_graphs.sizes.small == SLOTS


def test_the_pool_takes_what_the_draft_gives_up_and_nothing_else(place: Place) -> None:
    """There and back on a device that is full: over the fake driver no handle is made or freed meanwhile."""
    residency, target, _, _ = rank(place, 1000)
    place.fill()
    for begins, ends in ((Turn.EVICT, Turn.EVICTED), (Turn.RELOAD, Turn.RESIDENT)):
        residency.make(begins, residency.sizes.large, False)
        while (outcome := residency.outcome()) is None:
            residency.iterate()
        assert outcome == (begins, None)
        residency.make(ends, residency.sizes.large if ends is Turn.EVICTED else residency.sizes.small, False)
        assert target.token_to_kv_pool.size == residency.slots
        assert bytes_by_account(residency)["free"] >= 0
    assert residency.slots == SLOTS and residency.report()["evictions"] == residency.report()["reloads"] == 1
    place.check_handed_over()

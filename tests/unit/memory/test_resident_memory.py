"""Resident memory of this process follows the ledger, with real pools and a real draft."""

import os
import time
from pathlib import Path
from typing import Any

import torch

from sglang_nightjar.coordination.messages import Turn
from sglang_nightjar.memory.device import PosixDevice
from sglang_nightjar.memory.draft_store import DraftStore
from sglang_nightjar.memory.elastic_pool import ElasticKVPool
from sglang_nightjar.memory.ledger import Account, Ledger
from sglang_nightjar.memory.pools import PoolSizes
from sglang_nightjar.memory.relocate import Contraction
from sglang_nightjar.memory.residency import DraftResidency
from sglang_nightjar.platform.linear import PrepackedLinearMethod

SLOTS = 8192
MIB = 1 << 20


class Allocator:
    def grow(self, size: int) -> None: ...

    def shrink(self, size: int) -> None: ...


def pool(spare: int) -> Any:
    sizes = {"size": SLOTS, "page_size": 1, "head_num": 4, "head_dim": 64, "layer_num": 4}
    return ElasticKVPool.with_spare(spare, 0)(dtype=torch.float32, device="cpu", enable_memory_saver=False, **sizes)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_resident_memory_follows_the_ledger(tmp_path: Path) -> None:
    draft = torch.nn.Linear(4096, 6144)  # 96 MiB, and as much packed
    draft.quant_method = PrepackedLinearMethod()
    draft.quant_method.process_weights_after_loading(draft)
    store = DraftStore(draft, PosixDevice(tmp_path), shared_with=torch.nn.Module())
    target_pool, draft_pool = pool(320 * MIB), pool(0)
    ledger = Ledger(1024 * MIB)
    ledger.transfer(
        {
            Account.TARGET_KV: target_pool.nbytes,
            Account.DRAFT_KV: draft_pool.nbytes,
            Account.DRAFT_WEIGHTS: store.nbytes,
        }
    )
    large = target_pool.slots_for(target_pool.nbytes + draft_pool.nbytes + store.nbytes)
    memory = DraftResidency(
        ledger=ledger,
        store=store,
        target_pool=target_pool,
        draft_pool=draft_pool,
        allocator=Allocator(),
        sizes=PoolSizes(SLOTS, large, weights_only=SLOTS),
        chunk_bytes=16 * MIB,
        shrink=lambda limit, keep: Contraction(),
        on_capacity=lambda slots: None,
        on_draft_lost=lambda: None,
    )

    def held() -> int:
        return sum(ledger.held(account) for account in Account)

    def settle() -> None:
        while (ended := memory.outcome()) is None:
            memory.iterate()
            time.sleep(0.001)
        assert ended[1] is None

    def check() -> None:
        change = held() - began_held
        assert abs(resident() - began - change) <= 0.02 * began_held, f"ledger {change}, resident {resident() - began}"

    began, began_held = resident(), held()
    memory._give_draft_back()  # half of an eviction: the bytes are nobody's
    assert held() < began_held - 190 * MIB
    check()
    memory._resize(target_pool, Account.TARGET_KV, large)
    check()
    memory._resize(target_pool, Account.TARGET_KV, SLOTS)
    memory._resize(draft_pool, Account.DRAFT_KV, SLOTS)
    store.reload(16 * MIB, lambda: None)
    ledger.charge(Account.DRAFT_WEIGHTS, store.nbytes)
    for _ in range(3):
        memory.make(Turn.EVICT)
        settle()
        memory.make(Turn.EVICTED, large)
        check()
        memory.make(Turn.RELOAD)
        settle()
        memory.make(Turn.RESIDENT)
        check()
    assert held() == began_held

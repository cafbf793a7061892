"""Evict, reload, evict over the fake CUDA device, with every driver call refused in turn.

Everything is real but the driver: the draft's store and pinned mirror, both pools, the ledger, the allocator,
contraction with a request in the tail, and the threads. What follows a failure is what
`coordination/transitions.py` does. Steps are in flight on the default stream whenever a turn is made.
"""

import time
from contextlib import closing

import torch
from cuda_world import device_on
from fake_cuda import FakeCuda

from sglang_nightjar.coordination.messages import Turn
from sglang_nightjar.memory.draft_store import DraftStore
from sglang_nightjar.memory.elastic_allocator import ElasticTokenAllocator
from sglang_nightjar.memory.elastic_pool import ElasticKVPool
from sglang_nightjar.memory.ledger import Account, Ledger
from sglang_nightjar.memory.pools import PoolSizes
from sglang_nightjar.memory.relocate import CachedNode, contract
from sglang_nightjar.memory.residency import DraftResidency
from sglang_nightjar.policy.base import Residency

SMALL, HEADS, DIM = 127, 2, 16  # with the dummy, 128 slots of 128 bytes: two units in each buffer
PROMPT, BURST, LEFT = 20, 150, 50  # slots of a request: at first, while the pool is large, and of those in the end


class World:
    """A rank on a device that is full, and one request; it holds no prefix."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.device = device_on(cuda)
        unit = self.device.granularity
        self.model = torch.nn.Linear(3 * unit // 32, 8, bias=False)
        self.weights = self.model.weight.detach().clone()
        self.store = DraftStore(self.model, self.device, shared_with=torch.nn.Module())
        self.target, self.draft = self.make_pool(2, 7 * unit), self.make_pool(1, 0)
        self.kv = [*self.target.k_buffer, *self.target.v_buffer]
        self.allocator = ElasticTokenAllocator(SMALL, torch.float32, "cpu", None, need_sort=True)
        self.req_to_token = torch.zeros((1, 256), dtype=torch.int32)
        self.length = 0
        self.large = self.target.slots_for(self.target.nbytes + self.draft.nbytes + self.store.nbytes)
        uses = {
            Account.TARGET_KV: self.target.nbytes,
            Account.DRAFT_KV: self.draft.nbytes,
            Account.DRAFT_WEIGHTS: self.store.nbytes,
        }
        self.ledger = Ledger(sum(uses.values()))
        self.ledger.transfer(uses)
        self.memory = DraftResidency(
            ledger=self.ledger,
            store=self.store,
            target_pool=self.target,
            draft_pool=self.draft,
            allocator=self.allocator,
            sizes=PoolSizes(SMALL, self.large, weights_only=SMALL),
            chunk_bytes=unit,
            shrink=lambda limit, keep_cached: contract(
                limit,
                allocator=self.allocator,
                holders=self,
                req_to_token=self.req_to_token,
                buffers=self.kv,
                keep_cached=keep_cached,
                finish_step=lambda: None,
            ),
            on_capacity=lambda slots: None,
            on_draft_lost=lambda: None,
            before_work=self.device.mark,
        )
        self.append(PROMPT)
        cuda.memory = cuda.used
        self.addresses = self.all_addresses()

    def make_pool(self, layers: int, spare: int) -> ElasticKVPool:
        return ElasticKVPool.with_spare(spare, 0, self.device)(
            size=SMALL,
            page_size=1,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=DIM,
            layer_num=layers,
            device="cpu",
            enable_memory_saver=False,
        )

    def all_addresses(self) -> list[int]:
        buffers = [*self.kv, *self.draft.k_buffer, *self.draft.v_buffer, self.model.weight]
        return [tensor.data_ptr() for tensor in buffers]

    # The request, and what contraction asks about holders.

    def append(self, count: int) -> None:
        slots = self.allocator.alloc(count)
        assert slots is not None
        for index, buffer in enumerate(self.kv):
            buffer[slots] = (torch.arange(self.length, self.length + count)[:, None, None] + index / 8).float()
        self.req_to_token[0, self.length : self.length + count] = slots.to(torch.int32)
        self.length += count

    def rows(self) -> list[tuple[int, int]]:
        return [(0, self.length)]

    def nodes(self) -> list[CachedNode]:
        return []

    def evictable(self) -> int:
        return 0

    def prefilling(self) -> bool:
        return False

    def burst(self) -> None:
        """Long enough to reach into the tail, then short enough for the small pool, but still in the tail."""
        self.append(BURST)
        kept = torch.cat([self.req_to_token[0, :PROMPT], self.req_to_token[0, PROMPT + BURST - LEFT : PROMPT + BURST]])
        self.allocator.free(self.req_to_token[0, PROMPT : PROMPT + BURST - LEFT].clone())
        self.length = PROMPT + LEFT
        self.req_to_token[0, : self.length] = kept
        for index, buffer in enumerate(self.kv):
            buffer[kept.long()] = (torch.arange(self.length)[:, None, None] + index / 8).float()
        assert int(kept.max()) > SMALL

    def end_burst(self) -> None:
        self.allocator.free(self.req_to_token[0, PROMPT : self.length].clone())
        self.length = PROMPT

    # Turns.

    def launch_step(self) -> None:
        """A decode step over the pool as it is, and over the draft while it is here; it runs when it is waited for."""
        row_bytes = HEADS * DIM * 4
        for buffer in self.kv:
            self.cuda.use(buffer.data_ptr(), (self.memory.slots + 1) * row_bytes)
        if self.memory.state is Residency.RESIDENT:
            self.cuda.use(self.model.weight.data_ptr(), self.model.weight.nbytes)
            for buffer in (*self.draft.k_buffer, *self.draft.v_buffer):
                self.cuda.use(buffer.data_ptr(), (SMALL + 1) * row_bytes)

    def make(self, turn: Turn, slots: int = 0) -> None:
        self.launch_step()
        self.memory.make(turn, slots)
        self.launch_step()

    def finish(self) -> str | None:
        deadline = time.monotonic() + 30
        while (ended := self.memory.outcome()) is None:
            assert time.monotonic() < deadline, "the work does not end"
            self.memory.iterate()
            time.sleep(0)
        return ended[1]

    def end(self, turn: Turn) -> None:
        if turn is Turn.EVICT:
            self.make(Turn.EVICTED, self.large)
        else:
            self.make(Turn.RESIDENT)

    def go(self, turn: Turn) -> bool:
        """Whether the move succeeded; else it was undone."""
        self.make(turn)
        if self.finish() is None:
            self.end(turn)
            return True
        undo = Turn.RELOAD if turn is Turn.EVICT else Turn.EVICT
        self.make(undo)
        assert self.finish() is None, "one call was refused, and not this one"
        self.end(undo)
        return False

    def check(self, residency: Residency) -> None:
        memory, unit = self.memory, self.device.granularity
        there = residency is Residency.RESIDENT
        assert memory.state is residency and memory.slots == self.allocator.size == (SMALL if there else self.large)
        assert not self.cuda.violations
        mapped = self.store.nbytes * self.store.resident + self.target.nbytes + self.draft.nbytes
        assert self.store.resident == there == bool(self.draft.nbytes)
        assert len(self.cuda.mappings) == len(self.cuda.accessible) == mapped // unit
        assert len({handle for _, handle in self.cuda.mappings.values()}) == len(self.cuda.mappings)
        assert self.cuda.used == self.cuda.memory == len(self.cuda.held) * unit == mapped + self.device.pool.spare
        assert self.ledger.held(Account.TARGET_KV) == self.target.nbytes
        assert self.ledger.held(Account.DRAFT_KV) == self.draft.nbytes
        assert self.ledger.held(Account.DRAFT_WEIGHTS) == self.store.nbytes * there
        assert self.all_addresses() == self.addresses, "captured graphs hold these"
        if there:
            assert torch.equal(self.model.weight, self.weights)
        slots = self.req_to_token[0, : self.length].long()
        for index, buffer in enumerate(self.kv):
            assert buffer[slots, 1, 3].tolist() == [token + index / 8 for token in range(self.length)]
        self.allocator.check()


def run(refuse: int | None) -> tuple[int, str]:
    """The script, with one call refused and its move tried again; how many calls it makes, and which was refused."""
    cuda = FakeCuda()
    with closing(cuda):
        world = World(cuda)
        start, failed = len(cuda.calls), 0
        cuda.refuse = set() if refuse is None else {start + refuse}
        world.check(Residency.RESIDENT)
        for turn in (Turn.EVICT, Turn.RELOAD, Turn.EVICT):
            before, after = Residency.RESIDENT, Residency.EVICTED
            if turn is Turn.RELOAD:
                before, after = after, before
                world.burst()
            if not world.go(turn):
                failed += 1
                world.check(before)
                assert world.go(turn)
            world.check(after)
            if turn is Turn.RELOAD:
                world.end_burst()
        assert failed == (refuse is not None)
        assert "cuMemCreate" not in cuda.calls[start:] and "cuMemRelease" not in cuda.calls[start:]
        assert world.memory.report()["failures"] == failed
        return len(cuda.calls) - start, "" if refuse is None else cuda.calls[start + refuse]


def test_every_call_of_evict_reload_evict_refused_in_turn() -> None:
    total, _ = run(None)
    assert total > 70
    assert {run(refuse)[1] for refuse in range(total)} == {
        "cuCtxSetCurrent",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemcpyHtoDAsync",
        "digest",
        "zero",
    }


def call_off(refuse: int | None) -> int:
    """A reload that is called off after its first chunk, with one call refused from its beginning on."""
    cuda = FakeCuda()
    with closing(cuda):
        world = World(cuda)
        assert world.go(Turn.EVICT)
        start = len(cuda.calls)
        cuda.refuse = set() if refuse is None else {start + refuse}
        world.make(Turn.RELOAD)
        world.memory.iterate()  # permits one chunk
        deadline = time.monotonic() + 10
        while world.memory._work is not None and world.memory._work.running:
            assert time.monotonic() < deadline
            copied = cuda.calls[start:].count("cuMemcpyHtoDAsync")
            if copied and cuda.calls[-1] == "cuEventRecord":
                break
            time.sleep(0)
        world.make(Turn.EVICT)
        if world.finish() is None:
            world.make(Turn.EVICTED, world.large)
            world.check(Residency.EVICTED)
        else:  # undoing has failed as well
            world.make(Turn.EVICTED, SMALL)
            if world.memory._work is not None:
                world.finish()
            assert world.memory.state is Residency.EVICTED and not cuda.violations
        made = len(cuda.calls) - start
        cuda.refuse.clear()
        assert world.go(Turn.RELOAD)
        world.check(Residency.RESIDENT)
        assert world.go(Turn.EVICT)
        world.check(Residency.EVICTED)
        return made


def test_every_call_of_a_reload_that_is_called_off_refused_in_turn() -> None:
    total = call_off(None)
    assert total > 40
    for refuse in range(total):
        call_off(refuse)

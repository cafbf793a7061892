"""The draft's bookkeeping, against a draft whose KV can be read.

`ReadableDraft` runs the real worker's code over a forward that computes no numbers: the
"KV" of a slot is a hash of its token and of all KV before it, as the row's slots hold it at
that moment. One stale or missing slot anywhere before a token changes that token's hash.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_nightjar.speculation.chain_draft import ChainDraftWorker, _catchup_plan
from sglang_nightjar.speculation.draft_state import DraftState
from sglang_nightjar.speculation.inputs import ChainDraftInput, chain_verify_input

VOCABULARY = 3  # few tokens, so that prompts share prefixes
MOST_TOKENS = 48
ROWS, CONTEXT, SLOTS = 6, 64, 1000


def true_kv(tokens: list[int]) -> list[int]:
    kv: list[int] = []
    for token in tokens:
        kv.append(hash((token, tuple(kv))))
    return kv


class ReadableDraft(ChainDraftWorker):
    """The worker without a model, and without upstream's construction."""

    def __init__(self) -> None:
        self.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros((ROWS, CONTEXT), dtype=torch.int32))
        self.state = DraftState(SLOTS)
        self.kv = [0] * SLOTS
        self._draft_vocab = VOCABULARY
        self._most_tokens = MOST_TOKENS

    def row_kv(self, row: int, length: int) -> list[int]:
        return [self.kv[slot] for slot in self.req_to_token_pool.req_to_token[row, :length].tolist()]

    def _forward(self, batch: Any) -> torch.Tensor:
        self.forwards += 1
        assert len(batch.input_ids) <= MOST_TOKENS, "upstream's runner has no buffers for more"
        stops = batch.seq_lens.tolist()
        starts = [stop - 1 for stop in stops] if batch.forward_mode.is_decode() else batch.prefix_lens
        tokens, slots = iter(batch.input_ids.tolist()), iter(batch.out_cache_loc.tolist())
        for row, start, stop in zip(batch.req_pool_indices.tolist(), starts, stops, strict=True):
            for position in range(start, stop):
                slot = next(slots)
                assert slot == self.req_to_token_pool.req_to_token[row, position]
                self.kv[slot] = hash((next(tokens), tuple(self.row_kv(row, position))))
        assert next(tokens, None) is None and next(slots, None) is None
        ends = zip(batch.req_pool_indices.tolist(), stops, strict=True)
        chosen = torch.tensor([self.row_kv(row, stop)[-1] % VOCABULARY for row, stop in ends])
        return torch.nn.functional.one_hot(chosen, VOCABULARY).float()


class MiniScheduler:
    """Rows, slots and a prefix cache of page size 1. Speculation goes off and on at random."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.draft = ReadableDraft()
        self.free = list(range(1, SLOTS))
        self.cache: dict[tuple[int, ...], int] = {}  # a prefix, and the slot of its last token
        self.running: dict[int, Any] = {}  # by row
        self.finished: list[list[int]] = [[]]  # what requests left to the cache, some of it evicted since
        self.off = False
        self.waited = 0  # rounds in which a request had to wait for its catch-up

    def step(self) -> None:
        while len(self.free) < SLOTS // 2:
            self.evict()
        if self.rng.random() < 0.1:
            self.off = not self.off
        self.rng.choices([self.prefill, self.round, self.end, self.evict], weights=[4, 6, 4, 1])[0]()

    def _slot(self) -> int:
        return self.free.pop(self.rng.randrange(len(self.free)))

    def batch(self, rows: list[int], **fields: Any) -> Any:
        reqs = [self.running[row] for row in rows]
        seq_lens = torch.tensor([req.seq_len for req in reqs])
        return SimpleNamespace(reqs=reqs, req_pool_indices=torch.tensor(rows), seq_lens=seq_lens, **fields)

    def prefill(self) -> None:
        """One to three new requests in one batch, each on top of what the cache has of its prompt."""
        rows = [row for row in range(ROWS) if row not in self.running][: self.rng.randrange(1, 4)]
        written: list[int] = []
        for row in rows:
            known = self.rng.choice(self.finished)[:30]
            keep = self.rng.choice([len(known), self.rng.randrange(len(known) + 1)])
            prompt = known[:keep] + self._tokens(self.rng.randrange(1, 4))
            cached = 0
            while cached < len(prompt) - 1 and tuple(prompt[: cached + 1]) in self.cache:
                cached += 1
            slots = [self.cache[tuple(prompt[: n + 1])] for n in range(cached)]
            new = [self._slot() for _ in prompt[cached:]]
            self.draft.req_to_token_pool.req_to_token[row, : len(prompt)] = torch.tensor(slots + new)
            written += new
            self.running[row] = SimpleNamespace(
                rid=str(row), origin_input_ids=prompt, output_ids=[], seq_len=len(prompt), owned=new, first_owned=cached
            )
        if rows and self.off:
            before = self.draft.forwards
            self.draft.skip_prefill(self.batch(rows, out_cache_loc=torch.tensor(written)))
            assert self.draft.forwards == before
        elif rows:
            batch = self.batch(
                rows, out_cache_loc=torch.tensor(written), extend_num_tokens=len(written), orig_seq_lens=None
            )
            self.draft.prefill(batch, self.rng.choice([0, 3, 1000]))
            behind = self.draft.lags(batch).tolist()
            self.check([row for row, lag in zip(rows, behind, strict=True) if lag == 0], ahead=0)
        for row in rows:
            self.running[row].output_ids += self._tokens(1)

    def round(self) -> None:
        """Some of the running requests draft; a random number of drafts is accepted."""
        rows = [row for row in self.running if self.rng.random() < 0.7 and self.running[row].seq_len < CONTEXT - 10]
        if not rows:
            return
        gamma = 0 if self.off else self.rng.randrange(1, 5)
        for row in rows:
            req = self.running[row]
            while req.first_owned + len(req.owned) < req.seq_len + gamma + 1:
                req.owned.append(self._slot())
                self.draft.req_to_token_pool.req_to_token[row, req.first_owned + len(req.owned) - 1] = req.owned[-1]
        bonus = torch.tensor([self.running[row].output_ids[-1] for row in rows])
        batch = self.batch(rows, spec_info=ChainDraftInput(bonus_tokens=bonus), orig_seq_lens=None)
        if gamma == 0:
            self.draft.settle(batch, torch.ones(len(rows), dtype=torch.int32), 0)
            for row in rows:
                self.running[row].output_ids += self._tokens(1)
                self.running[row].seq_len += 1
            return
        wanted = torch.tensor([self.rng.random() < 0.9 for _ in rows])
        before = self.draft.forwards
        chain = self.draft.draft_chain(batch, gamma, wanted=wanted, catchup_tokens=self.rng.choice([0, 3, 1000]))
        drafted = [row for row, drafts in zip(rows, chain.drafted.tolist(), strict=True) if drafts]
        assert chain.candidates.shape == (len(rows), gamma + 1)
        assert self.draft.forwards - before == (gamma if drafted else 0) or not wanted.all() or len(drafted) < len(rows)
        assert not (chain.drafted & ~wanted).any()
        self.waited += int((wanted & ~chain.drafted).sum())
        self.check(drafted, ahead=1)
        counts = [
            self.rng.choice([gamma + 1, self.rng.randrange(1, gamma + 1)]) if row in drafted else 1 for row in rows
        ]
        accept_lens = torch.tensor(counts, dtype=torch.int32)
        self.draft.settle(batch, accept_lens, gamma, chain.drafted)
        for row, tokens, count in zip(rows, chain.candidates.tolist(), accept_lens.tolist(), strict=True):
            self.running[row].output_ids += tokens[1:count] + self._tokens(1)
            self.running[row].seq_len += count

    def end(self) -> None:
        """A request finishes and leaves its tokens to the cache, or is aborted and does not."""
        if not self.running:
            return
        row = self.rng.choice(list(self.running))
        req = self.running.pop(row)
        tokens = (req.origin_input_ids + req.output_ids)[: req.seq_len]
        finishes = self.rng.random() < 0.8
        if finishes:
            self.finished.append(tokens)
        for index, slot in enumerate(req.owned):
            prefix = tuple(tokens[: req.first_owned + index + 1])
            if finishes and len(prefix) > req.first_owned + index and prefix not in self.cache:
                self.cache[prefix] = slot
            else:
                self.free.append(slot)

    def evict(self) -> None:
        """Leaves of the cache go, where no request stands on them."""
        in_use = {int(slot) for row, req in self.running.items() for slot in self._row_slots(row, req.seq_len)}
        inner = {prefix[:-1] for prefix in self.cache}
        for prefix in [prefix for prefix in self.cache if prefix not in inner and self.cache[prefix] not in in_use]:
            if self.rng.random() < 0.5:
                self.free.append(self.cache.pop(prefix))

    def check(self, rows: list[int], *, ahead: int) -> None:
        """The draft has seen every token of `rows`, the bonus token (`ahead` 1) too, each after the right past."""
        for row in rows:
            req = self.running[row]
            tokens = (req.origin_input_ids + req.output_ids)[: req.seq_len + ahead]
            assert self.draft.row_kv(row, req.seq_len + ahead) == true_kv(tokens), f"row {row}: {tokens}"

    def _row_slots(self, row: int, length: int) -> list[int]:
        return self.draft.req_to_token_pool.req_to_token[row, :length].tolist()

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]


@pytest.mark.parametrize("seed", range(200))
def test_every_draft_follows_from_its_whole_past(seed: int) -> None:
    """Random prefills, rounds, ends and evictions, on and off: no draft is ever made from stale or missing KV."""
    scheduler = MiniScheduler(seed)
    for _ in range(120):
        scheduler.step()


def test_the_runs_above_exercise_enough() -> None:
    runs = [MiniScheduler(seed) for seed in range(10)]
    for scheduler in runs:
        for _ in range(120):
            scheduler.step()
    assert sum(run.draft.forwards for run in runs) > 400
    assert sum(len(run.cache) for run in runs) > 150
    assert sum(run.waited for run in runs) > 20, "catch-up in pieces"


@pytest.mark.parametrize(("accept_len", "seen"), [(1, 1), (2, 2), (3, 3), (4, 3)])
def test_settle_keeps_what_was_accepted_and_seen(accept_len: int, seen: int) -> None:
    """gamma 3: slots of the bonus token and three drafts, the third of which no draft forward has read."""
    draft = ReadableDraft()
    draft.req_to_token_pool.req_to_token[2, :8] = torch.arange(11, 19)
    draft.state.mark(torch.arange(1, 30))
    batch = SimpleNamespace(req_pool_indices=torch.tensor([2]), seq_lens=torch.tensor([4]))
    draft.settle(batch, torch.tensor([accept_len], dtype=torch.int32), 3)
    lens = draft.state.draft_lens(draft.req_to_token_pool.req_to_token, torch.tensor([2]), torch.tensor([8]))
    assert lens.tolist() == [4 + seen]


def test_committed_tokens_must_exist() -> None:
    draft = ReadableDraft()
    req = SimpleNamespace(rid="r", origin_input_ids=[1, 2], output_ids=[])
    bonus = ChainDraftInput(bonus_tokens=torch.tensor([0]))
    batch = SimpleNamespace(reqs=[req], req_pool_indices=torch.tensor([0]), seq_lens=torch.tensor([2]), spec_info=bonus)
    with pytest.raises(AssertionError, match="request r: tokens 0 to 3 asked, 2 committed"):
        draft.draft_chain(batch, 2, wanted=torch.tensor([True]), catchup_tokens=100)


def test_catchup_plan() -> None:
    """Ordinary lags (bonus token, last draft) are free; the shortest catch-up comes first; what is left goes on."""
    starts, ends = torch.tensor([0, 8, 5, 2]), torch.tensor([20, 10, 12, 3])
    wanted = torch.tensor([True, True, True, True])
    stops, spent = _catchup_plan(starts, ends, wanted, 100)
    assert (stops.tolist(), spent) == ([20, 10, 12, 3], 18 + 5)
    stops, spent = _catchup_plan(starts, ends, wanted, 9)
    assert (stops.tolist(), spent) == ([4, 10, 12, 3], 9)
    stops, spent = _catchup_plan(starts, ends, torch.tensor([True, False, True, True]), 0)
    assert (stops.tolist(), spent) == ([0, 8, 5, 3], 0)


def test_chain_verify_input() -> None:
    candidates = torch.tensor([[5, 6, 7], [8, 9, 10]])
    verify = chain_verify_input(candidates, torch.tensor([4, 20]))
    assert verify.draft_token.tolist() == [5, 6, 7, 8, 9, 10]
    assert verify.positions.tolist() == [4, 5, 6, 20, 21, 22]
    assert verify.retrieve_index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert verify.retrieve_next_token.tolist() == [[1, 2, -1], [1, 2, -1]]
    assert verify.retrieve_next_sibling.tolist() == [[-1, -1, -1], [-1, -1, -1]]
    assert (verify.spec_steps, verify.topk, verify.draft_token_num) == (2, 1, 3)
    assert verify.is_verify_input() and not verify.is_draft_input()


def test_draft_input_follows_batch_surgery() -> None:
    running = ChainDraftInput(bonus_tokens=torch.tensor([3, 4, 5]))
    running.filter_batch(torch.tensor([0, 2]))
    running.merge_batch(ChainDraftInput(bonus_tokens=torch.tensor([9], dtype=torch.int32)))
    assert running.bonus_tokens.tolist() == [3, 5, 9] and running.bonus_tokens.dtype == torch.int64
    assert running.is_draft_input()

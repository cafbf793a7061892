"""Test support: random histories of requests under a draft whose KV can be read.

`ReadableDraft` runs the real worker's code over a forward that computes no numbers: the
"KV" of a slot is a hash of its token and of all KV before it, as the row's slots hold it at
that moment. One stale or missing slot anywhere before a token changes that token's hash.
"""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from sglang_nightjar.speculation.chain_draft import ChainDraftWorker
from sglang_nightjar.speculation.draft_state import DraftState
from sglang_nightjar.speculation.inputs import ChainDraftInput
from sglang_nightjar.speculation.late_tokens import LateTokens
from sglang_nightjar.speculation.transfer import to_host

VOCABULARY = 3  # few tokens, so that prompts share prefixes
MOST_TOKENS = 48
ROWS, CONTEXT, SLOTS = 6, 64, 1000


def true_kv(tokens: list[int]) -> list[int]:
    kv: list[int] = []
    for token in tokens:
        kv.append(hash((token, tuple(kv))))
    return kv


def numbers(tensor: torch.Tensor) -> list[Any]:
    """What is in a tensor of any device."""
    found: list[Any] = to_host(tensor).tolist()
    return found


class ReadableDraft(ChainDraftWorker):
    """The worker without a model, and without upstream's construction.

    `device`: that the batch and the slots are on. `unseen`: within it, this support may look there.
    """

    def __init__(
        self, device: torch.device | str = "cpu", unseen: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.device, self.unseen = device, unseen
        table = torch.zeros((ROWS, CONTEXT), dtype=torch.int32, device=device)
        self.req_to_token_pool = SimpleNamespace(req_to_token=table)
        self.state = DraftState(SLOTS, device)
        self.kv = [0] * SLOTS
        self._draft_vocab = VOCABULARY
        self._most_tokens = MOST_TOKENS

    def row_slots(self, row: int, length: int) -> list[int]:
        with self.unseen():
            slots = numbers(self.req_to_token_pool.req_to_token[row, :length])
        return slots

    def row_kv(self, row: int, length: int) -> list[int]:
        return [self.kv[slot] for slot in self.row_slots(row, length)]

    def _forward(self, batch: Any) -> torch.Tensor:
        self.forwards += 1
        with self.unseen():
            return self._compute(batch)

    def _compute(self, batch: Any) -> torch.Tensor:
        assert len(batch.input_ids) <= MOST_TOKENS, "upstream's runner has no buffers for more"
        stops, rows = numbers(batch.seq_lens), numbers(batch.req_pool_indices)
        starts = [stop - 1 for stop in stops] if batch.forward_mode.is_decode() else batch.prefix_lens
        tokens, slots = iter(numbers(batch.input_ids)), iter(numbers(batch.out_cache_loc))
        table = to_host(self.req_to_token_pool.req_to_token)
        for row, start, stop in zip(rows, starts, stops, strict=True):
            for position in range(start, stop):
                slot = next(slots)
                assert slot == table[row, position]
                self.kv[slot] = hash((next(tokens), tuple(self.row_kv(row, position))))
        assert next(tokens, None) is None and next(slots, None) is None
        chosen = torch.tensor([self.row_kv(row, stop)[-1] % VOCABULARY for row, stop in zip(rows, stops, strict=True)])
        assert batch.seq_lens_cpu.tolist() == stops, "the host's copy of the lengths is another"
        return torch.nn.functional.one_hot(chosen, VOCABULARY).float().to(self.device)


class MiniScheduler:
    """Rows, slots and a prefix cache of page size 1. Speculation goes off and on at random.

    `overlap`: a step's tokens are appended to `output_ids` after the next step; `output` has them at once.
    """

    def __init__(self, seed: int, overlap: bool = False, draft: ReadableDraft | None = None) -> None:
        self.rng = random.Random(seed)
        self.overlap = overlap
        self.late = LateTokens()
        self.unprocessed: list[tuple[Any, list[int]]] = []
        self.draft = draft or ReadableDraft()
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
        lengths = torch.tensor([req.seq_len for req in reqs])
        return SimpleNamespace(
            reqs=reqs,
            req_pool_indices=self._there(rows),
            seq_lens=lengths.to(self.draft.device),
            seq_lens_cpu=lengths,
            **fields,
        )

    def _there(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers).to(self.draft.device)

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
            self._write_row(row, 0, slots + new)
            written += new
            self.running[row] = SimpleNamespace(
                rid=str(row), origin_input_ids=prompt, output_ids=[], output=[], seq_len=len(prompt), owned=new,
                first_owned=cached,
            )  # fmt: skip
        if rows and self.off:
            before = self.draft.forwards
            self.draft.skip(self.batch(rows, out_cache_loc=self._there(written)))
            assert self.draft.forwards == before
        elif rows:
            batch = self.batch(
                rows, out_cache_loc=self._there(written), extend_num_tokens=len(written), orig_seq_lens=None
            )
            self.draft.prefill(batch, self.rng.choice([0, 3, 1000]))
            with self.draft.unseen():
                behind = self.draft.lags(batch).tolist()
            self.check([row for row, lag in zip(rows, behind, strict=True) if lag == 0], ahead=0)
        if rows:
            self.commit({row: self._tokens(1) for row in rows})

    def commit(self, runs: dict[int, list[int]]) -> None:
        """A step has committed `runs`, by row."""
        for row, run in runs.items():
            self.running[row].output += run
        for req, run in self.unprocessed:
            req.output_ids += run
        self.unprocessed = [(self.running[row], run) for row, run in runs.items()]
        if self.overlap:
            self.late.remember([req for req, _ in self.unprocessed], [run for _, run in self.unprocessed])
        else:
            for req, run in self.unprocessed:
                req.output_ids += run
            self.unprocessed = []

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
                self._write_row(row, req.first_owned + len(req.owned) - 1, req.owned[-1:])
        bonus = self._there([self.running[row].output[-1] for row in rows])
        batch = self.batch(rows, spec_info=ChainDraftInput(bonus_tokens=bonus), orig_seq_lens=None)
        if gamma == 0:
            batch.out_cache_loc = self.draft._slots(batch, batch.seq_lens)
            self.draft.skip(batch)
            self.commit({row: self._tokens(1) for row in rows})
            for row in rows:
                self.running[row].seq_len += 1
            return
        wanted = torch.tensor([self.rng.random() < 0.9 for _ in rows])
        before = self.draft.forwards
        late = self.late.of(batch.reqs, (batch.seq_lens_cpu + 1).tolist())
        budget = self.rng.choice([0, 3, 1000])
        chain = self.draft.draft_chain(batch, gamma, wanted=wanted, catchup_tokens=budget, late=late)
        drafted = [row for row, drafts in zip(rows, chain.drafted.tolist(), strict=True) if drafts]
        assert chain.candidates.shape == (len(rows), gamma + 1)
        assert self.draft.forwards - before == (gamma if drafted else 0) or not wanted.all() or len(drafted) < len(rows)
        assert not (chain.drafted & ~wanted).any()
        self.waited += int((wanted & ~chain.drafted).sum())
        self.check(drafted, ahead=1)
        counts = [
            self.rng.choice([gamma + 1, self.rng.randrange(1, gamma + 1)]) if row in drafted else 1 for row in rows
        ]
        self.draft.settle(batch, self._there(counts), gamma, chain.drafted)
        with self.draft.unseen():
            candidates = numbers(chain.candidates)
        verified = zip(rows, candidates, counts, strict=True)
        self.commit({row: tokens[1:count] + self._tokens(1) for row, tokens, count in verified})
        for row, count in zip(rows, counts, strict=True):
            self.running[row].seq_len += count

    def end(self) -> None:
        """A request finishes and leaves its tokens to the cache, or is aborted and does not."""
        if not self.running:
            return
        row = self.rng.choice(list(self.running))
        req = self.running.pop(row)
        tokens = (req.origin_input_ids + req.output)[: req.seq_len]
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
        in_use = {int(slot) for row, req in self.running.items() for slot in self.draft.row_slots(row, req.seq_len)}
        inner = {prefix[:-1] for prefix in self.cache}
        for prefix in [prefix for prefix in self.cache if prefix not in inner and self.cache[prefix] not in in_use]:
            if self.rng.random() < 0.5:
                self.free.append(self.cache.pop(prefix))

    def check(self, rows: list[int], *, ahead: int) -> None:
        """The draft has seen every token of `rows`, the bonus token (`ahead` 1) too, each after the right past."""
        for row in rows:
            req = self.running[row]
            tokens = (req.origin_input_ids + req.output)[: req.seq_len + ahead]
            assert self.draft.row_kv(row, req.seq_len + ahead) == true_kv(tokens), f"row {row}: {tokens}"

    def _write_row(self, row: int, start: int, slots: list[int]) -> None:
        self.draft.req_to_token_pool.req_to_token[row, start : start + len(slots)] = self._there(slots).to(torch.int32)

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

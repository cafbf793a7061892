"""The hash chain: the same whatever the forwards were, and changed by any slot that is not what it should be."""

from typing import Any

import numpy as np
import pytest

from sglang_nightjar.emulate import context_hash as module
from sglang_nightjar.emulate.context_hash import context_hash, next_tokens, weight_values
from sglang_nightjar.emulate.vocabulary import FIRST, FIRST_DOMAIN, ORDINARY, VOCABULARY

SLOTS = 400
MASK = (1 << 64) - 1


class World:
    """Two requests over one pool, their slots scattered; `run` makes forwards over spans of their tokens."""

    def __init__(self, seed: int = 0, lengths: tuple[int, int] = (90, 57)) -> None:
        rng = np.random.default_rng(seed)
        self.tokens = [rng.integers(FIRST, len(VOCABULARY), length) for length in lengths]
        self.table = np.zeros((4, 128), np.int32)
        order = rng.permutation(np.arange(1, SLOTS))
        self.rows = (3, 1)
        for row, length, slots in zip(self.rows, lengths, np.split(order[: sum(lengths)], [lengths[0]]), strict=True):
            self.table[row, :length] = slots
        self.k, self.v = (np.zeros((SLOTS, 5), np.uint32) for _ in range(2))

    def run(self, *spans: tuple[int, int, int]) -> list[int]:
        """One forward over positions `start` up to `stop` of each (request, start, stop); hashes after them."""
        tokens, positions, slots = [], [], []
        for request, start, stop in spans:
            tokens.append(self.tokens[request][start:stop])
            positions.append(np.arange(start, stop))
            slots.append(self.table[self.rows[request], start:stop].astype(np.int64))
        edges = np.concatenate(([0], np.cumsum([stop - start for _, start, stop in spans])))
        requests = np.array([self.rows[request] for request, _, _ in spans])
        joined = (np.concatenate(parts) for parts in (tokens, positions, slots))
        hashes, _ = context_hash(*joined, requests, edges, self.table, self.k, self.v)
        return hashes.tolist()


def reference(tokens: Any) -> list[int]:
    """The same hashes from the tokens alone, in Python's own integers, without slots."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    first: list[int] = []
    second: list[int] = []
    for position, token in enumerate(int(token) for token in tokens):
        state = (token + 1) * 0x9E3779B97F4A7C15 & MASK ^ (position + 1) * 0xD1B54A32D192ED03 & MASK
        if position:
            state = (mix(state ^ first[-1]) + second[-1]) & MASK
            for _ in range(module.READS):
                other = mix(state) % position
                state = (mix(state ^ first[other]) + second[other]) & MASK
        first.append(mix(state))
        second.append(mix(first[-1] ^ 0x2545F4914F6CDD1D))
    return first


@pytest.fixture
def world() -> World:
    return World()


def test_prefill_follows_the_definition(world: World) -> None:
    assert world.run((0, 0, 90), (1, 0, 57)) == reference(world.tokens[0]) + reference(world.tokens[1])


def test_every_way_to_the_same_context_gives_the_same(world: World) -> None:
    """Chunks, extends over a cached prefix, decodes of a batch, verification of several tokens, in any mix."""
    expected = [reference(tokens) for tokens in world.tokens]
    rng = np.random.default_rng(1)
    done = [0, 0]
    while done != [90, 57]:
        spans = []
        for request, length in enumerate((90, 57)):
            count = min(int(rng.integers(1, 9)), length - done[request])
            if count and rng.random() < 0.7:
                spans.append((request, done[request], done[request] + count))
                done[request] += count
        if spans:
            assert world.run(*spans) == [h for r, start, stop in spans for h in expected[r][start:stop]]


def test_a_rejected_draft_leaves_nothing_behind(world: World) -> None:
    expected = reference(world.tokens[0])
    world.run((0, 0, 40))
    kept = world.tokens[0].copy()
    world.tokens[0][41:45] = FIRST
    world.run((0, 40, 45))
    world.tokens[0] = kept
    assert world.run((0, 41, 50)) == expected[41:50]


@pytest.mark.parametrize("what", ["k", "v"])
def test_a_damaged_predecessor_changes_what_follows(world: World, what: str) -> None:
    expected = reference(world.tokens[0])
    world.run((0, 0, 60))
    getattr(world, what)[world.table[3, 59], 1] ^= 1
    assert world.run((0, 60, 61)) != expected[60:61]


def test_a_damaged_slot_anywhere_is_found_sooner_or_later(world: World) -> None:
    """Each token reads `READS` others: of 50 tokens after a slot of 40 was lost, few miss it."""
    expected = reference(world.tokens[0])
    world.run((0, 0, 40))
    healthy = world.k.copy(), world.v.copy()
    found = 0
    for lost in range(39):
        world.k[:], world.v[:] = healthy
        world.k[world.table[3, lost]], world.v[world.table[3, lost]] = 0, 0
        found += world.run((0, 40, 90))[-1] != expected[89]
    assert found >= 28, f"{found} of 39 lost slots were noticed"


def test_relocation_done_right_is_not_noticed(world: World) -> None:
    expected = reference(world.tokens[0])
    world.run((0, 0, 60))
    old = world.table[3, :60].copy()
    free = np.setdiff1d(np.arange(1, SLOTS), world.table[[3, 1]])[:60]
    world.k[free], world.v[free] = world.k[old], world.v[old]
    world.k[old], world.v[old] = 7, 7
    world.table[3, :60] = free
    assert world.run((0, 60, 90)) == expected[60:]


def test_marks(world: World) -> None:
    """The last domain tag stands until the next one; the random bits settle and differ between requests."""
    world.tokens[0][[2, 50]] = FIRST_DOMAIN + 4, FIRST_DOMAIN
    world.run((0, 0, 90), (1, 0, 57))
    marks = world.k[world.table[3, :90], 2]
    assert (marks >> 24).tolist() == [0] * 2 + [5] * 48 + [1] * 40
    assert len(set((marks[module.SETTLED - 1 :] & 0xFFFFFF).tolist())) == 1
    assert len(set((marks[: module.SETTLED] & 0xFFFFFF).tolist())) == module.SETTLED
    assert marks[-1] & 0xFFFFFF != world.k[world.table[1, 56], 2] & 0xFFFFFF


def test_next_tokens_are_ordinary_and_as_good_as_random() -> None:
    hashes = np.random.default_rng(0).integers(0, 1 << 63, 50_000).astype(np.uint64)
    tokens = next_tokens(hashes, weight_values(np.arange(1000)))
    assert tokens.min() == FIRST and tokens.max() == len(VOCABULARY) - 1
    counts = np.bincount(tokens - FIRST, minlength=ORDINARY)
    expected = len(hashes) / ORDINARY
    assert ((counts - expected) ** 2 / expected).sum() < ORDINARY + 6 * np.sqrt(2 * ORDINARY)


def test_a_wrong_weight_changes_the_tokens_that_read_it() -> None:
    hashes = np.arange(1 << 20, (1 << 20) + 5000, dtype=np.uint64)
    right, wrong = weight_values(np.arange(1000)), weight_values(np.arange(1000))
    wrong[:] = 0
    wrong[123] = right[123]
    same = next_tokens(hashes, right) == next_tokens(hashes, wrong)
    assert np.flatnonzero(same).tolist() == np.flatnonzero(hashes % np.uint64(1000) == 123).tolist()

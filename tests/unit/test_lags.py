"""What is remembered of the draft's lag is what would be found by looking, and it is looked for no more than needed."""

from types import SimpleNamespace
from typing import Any

import torch

from sglang_nightjar.speculation.draft_state import DraftState
from sglang_nightjar.speculation.lags import KnownLags


class World:
    """Requests of one row each; row r has the slots from 10 * r + 1 on."""

    def __init__(self) -> None:
        self.state = DraftState(100)
        self.req_to_token = torch.arange(1, 91).view(9, 10)
        self.looked = 0
        self.lags = KnownLags(self.state, self.look_up)

    def look_up(self, batch: Any) -> torch.Tensor:
        self.looked += 1
        return batch.seq_lens - self.state.draft_lens(self.req_to_token, batch.req_pool_indices, batch.seq_lens)

    def batch(self, *lengths: int, first: int = 0) -> Any:
        rows = range(first, first + len(lengths))
        reqs = [SimpleNamespace(rid=f"request {row}") for row in rows]
        return SimpleNamespace(reqs=reqs, req_pool_indices=torch.tensor(rows), seq_lens=torch.tensor(lengths))

    def see(self, row: int, tokens: int) -> None:
        self.state.mark(self.req_to_token[row, :tokens])

    def largest(self, batch: Any) -> int:
        """Asked, and compared with what is found."""
        found, tokens = self.lags.look(batch)
        assert tokens == int(batch.seq_lens.sum())
        looked = self.looked
        assert found == int(self.look_up(batch).max())
        self.looked = looked
        return found


def test_plain_decodes_are_looked_up_once() -> None:
    world = World()
    world.see(0, 4)
    world.see(1, 2)
    assert [world.largest(world.batch(4 + step, 3 + step)) for step in range(4)] == [1, 2, 3, 4]
    assert world.looked == 1


def test_the_same_batch_is_as_much_further_as_its_first_request() -> None:
    world = World()
    world.see(1, 2)
    batch = world.batch(4, 3)
    assert world.largest(batch) == 4
    batch.seq_lens += 1
    assert world.largest(batch) == 5
    batch.reqs = batch.reqs + world.batch(7, first=2).reqs  # one joins
    batch.seq_lens, batch.req_pool_indices = torch.tensor([6, 5, 7]), torch.arange(3)
    assert world.largest(batch) == 7
    world.see(0, 6)
    world.see(2, 7)
    world.lags.forget()
    assert world.largest(batch) == 3
    world.state.clear_all()
    assert world.largest(batch) == 7


def test_a_request_that_leaves_is_not_counted() -> None:
    world = World()
    world.see(0, 3)
    assert world.largest(world.batch(3, 5)) == 5
    assert world.largest(world.batch(4)) == 1 and world.looked == 1


def test_one_that_is_not_known_is_looked_up() -> None:
    world = World()
    world.see(0, 3)
    world.see(1, 1)
    assert world.largest(world.batch(3)) == 0
    assert world.largest(world.batch(4, 5)) == 4 and world.looked == 2


def test_what_the_draft_has_read_since() -> None:
    world = World()
    assert world.largest(world.batch(5)) == 5
    world.see(0, 5)
    world.lags.forget()
    assert world.largest(world.batch(6)) == 1 and world.looked == 2


def test_a_draft_that_has_been_away() -> None:
    world = World()
    world.see(0, 5)
    assert world.largest(world.batch(5)) == 0
    world.state.clear_all()
    assert world.largest(world.batch(6)) == 6 and world.looked == 2

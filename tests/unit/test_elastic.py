"""Who may move the draft: the planner, an idle server, and an operator, whose eviction stands until he undoes it."""

from types import SimpleNamespace

import pytest
from arena_kinds import Kind
from fake_rank import Rank

from sglang_nightjar.coordination.coordinator import Coordinator
from sglang_nightjar.coordination.messages import Directive, Turn
from sglang_nightjar.coordination.transport import NoTransport
from sglang_nightjar.elastic import Elastic
from sglang_nightjar.memory.pools import PoolSizes
from sglang_nightjar.policy.base import Move, Residency

IDLE_S, HOLD_S = 5.0, 30.0


class Server:
    """Rank 0 alone, over a real residency. Its loop runs as often as the test says."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.step = 0
        self.rank = Rank(Kind("posix"))
        self.coordinator = Coordinator(NoTransport(), 1, lambda: self.now_s)
        self.elastic = Elastic(
            self.rank.memory,
            self.coordinator,
            lambda: self.now_s,
            idle_reload_s=IDLE_S,
            hold_s=HOLD_S,
            keep_cached=lambda: False,
            finish_step=lambda: None,
        )

    def loop(self, idle: bool = False) -> None:
        """One iteration, with a directive where one is due."""
        self.elastic.iterate(idle, self.step + 1)
        self.coordinator.poll()
        if self.elastic.due:
            following = self.elastic.next_turn()
            assert following is not None
            self.step += 1
            turn = (following.turn, following.slots)
            self.elastic.apply(Directive(following.epoch, self.step, 0, 64, None, *turn))

    def settle(self) -> Residency:
        """Where the draft is once nothing moves any more."""
        for _ in range(100_000):
            self.loop()
            if not self.elastic.moving:
                return self.elastic.residency
        raise AssertionError(f"still moving: {self.elastic.report()}")

    def idle(self, seconds: float) -> Residency:
        """Where the draft is after so many idle seconds."""
        self.loop(idle=True)
        self.now_s += seconds
        self.loop(idle=True)
        return self.settle()


@pytest.fixture
def server() -> Server:
    return Server()


def test_an_idle_server_takes_back_what_the_planner_has_evicted(server: Server) -> None:
    server.elastic.want_move(Move.EVICT, 1)
    assert server.settle() is Residency.EVICTED
    assert not server.elastic.report()["sent_away"]
    assert server.idle(IDLE_S - 0.1) is Residency.EVICTED
    server.loop()  # something ran
    assert server.idle(IDLE_S + 0.1) is Residency.RESIDENT


def test_what_a_hand_has_sent_away_stays_away(server: Server) -> None:
    server.elastic.want(Turn.EVICT, 1, by_hand=True)
    assert server.settle() is Residency.EVICTED and server.elastic.report()["sent_away"]
    assert server.idle(100 * HOLD_S) is Residency.EVICTED
    server.elastic.want_move(Move.RELOAD, 9)
    assert server.settle() is Residency.EVICTED, "the planner may not undo it either"
    server.elastic.want(Turn.RELOAD, 9, by_hand=True)
    assert server.settle() is Residency.RESIDENT and not server.elastic.report()["sent_away"]


def test_what_a_hand_has_brought_back_stays_for_a_while(server: Server) -> None:
    server.elastic.want_move(Move.EVICT, 1)
    server.settle()
    server.elastic.want(Turn.RELOAD, 2, by_hand=True)
    assert server.settle() is Residency.RESIDENT
    server.elastic.want_move(Move.EVICT, 3)
    assert server.settle() is Residency.RESIDENT
    server.now_s += HOLD_S
    server.elastic.want_move(Move.EVICT, 4)
    assert server.settle() is Residency.EVICTED
    assert server.idle(IDLE_S + 0.1) is Residency.RESIDENT, "it is the planner's again"


def test_an_eviction_by_hand_that_failed_binds_nobody(server: Server) -> None:
    server.rank.target.full = True
    server.elastic.want(Turn.EVICT, 1, by_hand=True)
    assert server.settle() is Residency.RESIDENT and not server.elastic.report()["sent_away"]
    server.rank.target.full = False
    server.now_s += HOLD_S
    server.elastic.want_move(Move.EVICT, 2)
    assert server.settle() is Residency.EVICTED
    assert server.idle(IDLE_S + 0.1) is Residency.RESIDENT


def test_a_refused_move_by_hand_changes_nothing(server: Server) -> None:
    server.elastic.want(Turn.RELOAD, 1, by_hand=True)
    assert server.settle() is Residency.RESIDENT
    server.elastic.want_move(Move.EVICT, 2)
    assert server.settle() is Residency.EVICTED


@pytest.mark.parametrize("turn", Turn)
def test_a_turn_is_made_with_no_step_under_way(turn: Turn) -> None:
    happened: list[str] = []
    memory = SimpleNamespace(
        state=Residency.RESIDENT, sizes=PoolSizes(10, 20, 15), make=lambda turn, *_: happened.append(turn.name)
    )
    elastic = Elastic(
        memory,  # type: ignore[arg-type]
        Coordinator(NoTransport(), 1, lambda: 0.0),
        lambda: 0.0,
        idle_reload_s=IDLE_S,
        hold_s=HOLD_S,
        keep_cached=lambda: True,
        finish_step=lambda: happened.append("finished"),
    )
    elastic.apply(Directive(1, 1, 0, 64, turn=turn))
    assert happened == ([] if turn is Turn.NONE else ["finished", turn.name])

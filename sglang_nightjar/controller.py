"""One per rank: rank 0 asks the planner, every rank carries out the same directive.

The scheduler's hooks (`patches/lockstep.py`, `patches/outcome.py`) call it once per iteration:
`propose` on rank 0 gives the bytes to broadcast, `apply` on every rank puts them in force, and
`finished` reports the step's outcome, from which rank 0's policy learns.
"""

import logging
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.coordination.agent import Agent
from sglang_nightjar.coordination.coordinator import Coordinator
from sglang_nightjar.coordination.messages import Directive, Turn, decode, encode
from sglang_nightjar.coordination.transport import NoTransport, ZmqTransport, endpoint_in, run_folder
from sglang_nightjar.elastic import Elastic
from sglang_nightjar.observe.counters import Counters, HitRate, StepFacts
from sglang_nightjar.observe.journal import Journal
from sglang_nightjar.policy.base import Decision, Observation, Residency, State
from sglang_nightjar.policy.planner import Planner
from sglang_nightjar.policy.registry import FIRST_GAMMA, PolicyOptions, make_policy

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 30.0  # switches are summed up, not logged one by one
_TELL_EVERY = 64  # directives between two digests of them sent to rank 0
_LEAST_CATCHUP = 64  # tokens: a budget below this would never get anywhere


@dataclass(slots=True)
class Controller:
    """The directive in force, and the planner behind it on rank 0.

    Attributes:
        planner: None on every rank but 0.
        directive: in force since the last `apply`.
        worker: set by the speculative worker that carries directives out.
        channel: the asynchronous side: rank 0's coordinator, another rank's agent.
        constant: gamma of a policy that never chooses another; such a policy is asked when gamma must be
            restored and not otherwise.
        elastic: whether the draft may leave; `memory` is how, once the pools are made.
        draft_bytes: that leave with the draft: its weights, and its KV per slot.
        prefill_token_s: seconds to compute one prompt token, as lately measured.
        hits: how much of the prompts the radix cache has served lately.
        clock: monotonic seconds.
    """

    planner: Planner | None
    max_gamma: int
    initial_gamma: int
    catchup_budget_s: float
    journal: Journal | None = None
    clock: Callable[[], float] = time.monotonic
    worker: Any = None
    channel: Coordinator | Agent | None = None
    constant: int | None = None
    elastic: bool = False
    memory: Elastic | None = None
    draft_bytes: tuple[int, int] = (0, 0)
    prefill_token_s: float = 0.0
    hits: HitRate = field(default_factory=HitRate)
    directive: Directive = field(init=False)
    counters: Counters = field(init=False)
    _per_catchup_token_s: float = 1e-3  # until a catch-up has been timed
    _digest: int = 0  # of every directive so far
    _decided_for: int = 0  # batch size of the last decision; 0 once a step has used it
    _logged_s: float = float("-inf")
    _logged: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.directive = Directive(0, 0, self.initial_gamma, self._catchup_tokens())
        self.counters = Counters([0] * (self.max_gamma + 1))

    @property
    def gamma(self) -> int:
        return self.directive.gamma

    def reserve(self) -> int:
        """KV slots a request may write in a decode step: the bonus token's and its drafts'."""
        return self.directive.gamma + 1

    @property
    def residency(self) -> Residency:
        return Residency.RESIDENT if self.memory is None else self.memory.residency

    @property
    def moving(self) -> bool:
        """Whether the draft is on its way, so that the loop must not sleep."""
        return self.memory is not None and self.memory.moving

    def wants_decision(self, batch_size: int) -> bool:
        """Whether a directive is due: a memory transition goes on, or the coming step needs a new decision
        (the last one is used up, or the batch is another)."""
        if self.planner is None:
            return False
        if self.memory is not None and self.memory.due:
            return True
        return batch_size > 0 and batch_size != self._decided_for and not self._settled()

    def _settled(self) -> bool:
        """Whether the policy would say what is in force anyway, and nobody records that it was asked."""
        wanted = self.constant if self.residency is Residency.RESIDENT else 0
        return self.constant is not None and self.journal is None and self.directive.step > 0 and self.gamma == wanted

    def propose(self, state: State | None) -> bytes:
        """Rank 0: decides, and returns the bytes every rank must `apply`. `state`: None where nothing decodes."""
        assert self.planner is not None, "only rank 0 decides"
        decision = Decision(self.gamma)
        step = self.directive.step + 1
        if state is not None:
            decision = self.planner.decide(state)
            self._decided_for = state.batch_size
            if self.journal is not None:
                self.journal.write("state", state)
        epoch, turn, slots, keep, gamma = self.directive.epoch, Turn.NONE, 0, False, decision.gamma
        if self.memory is not None:
            self.memory.want_move(decision.move, step)
            following = self.memory.next_turn()
            if following is not None:
                epoch, turn, slots = following.epoch, following.turn, following.slots
                keep = turn is Turn.RELOAD and self.memory.keep_cached()
            if turn is Turn.EVICT or self.residency is not Residency.RESIDENT:
                gamma = 0
        budget = decision.verify_budget if gamma else None
        return encode(Directive(epoch, step, gamma, self._catchup_tokens(), budget, turn, slots, keep))

    def apply(self, item: bytes) -> None:
        """Every rank: puts a directive in force. They arrive in order; a gap would be a broken channel."""
        directive = decode(item)
        assert directive.step == self.directive.step + 1, (
            f"directive {directive.step} follows {self.directive.step}: the lockstep channel lost one"
        )
        if (directive.gamma > 0) != (self.directive.gamma > 0):
            self.counters.switches += 1
        self.directive = directive
        if self.memory is not None:
            self.memory.apply(directive)
        assert directive.gamma == 0 or self.residency is Residency.RESIDENT, (
            f"gamma {directive.gamma} while the draft is {self.residency.name}"
        )
        self._digest = zlib.crc32(item, self._digest)
        if directive.step % _TELL_EVERY == 0:
            if isinstance(self.channel, Coordinator):
                self.channel.note(directive.step, self._digest)
            elif self.channel is not None:
                self.channel.tell(directive.epoch, directive.step, self._digest)
        if self.journal is not None:
            self.journal.write("directive", msgspec.structs.asdict(directive))
            if self.memory is not None and directive.turn is not Turn.NONE:
                self.journal.write("memory", {"now_s": self.clock(), **self.memory.report()})

    def poll(self, idle: bool) -> None:
        """Every rank, every iteration, between steps: reads the asynchronous channel, goes on with what moves.
        Never waits. `idle`: nothing runs and nothing waits."""
        if self.channel is not None:
            self.channel.poll()
        if self.memory is not None:
            self.memory.iterate(idle, self.directive.step + 1)

    def refusal(self, turn: Turn) -> str | None:
        """Why the draft cannot make `turn` now, or None."""
        return "the memory of this server is not elastic" if self.memory is None else self.memory.refusal(turn)

    def want(self, turn: Turn) -> None:
        """An operator wants the draft moved; rank 0 sees to it."""
        if self.memory is not None:
            self.memory.want(turn, self.directive.step + 1, by_hand=True)

    def finished(self, seen: Observation, facts: StepFacts | None) -> None:
        """Every rank: a step is over. `facts` is None for a prefill."""
        if facts is not None:
            self._decided_for = 0
            self.counters.steps_by_gamma[facts.gamma] += 1
            self.counters.drafted += facts.drafted
            self.counters.committed += facts.tokens
            self.counters.rejected += facts.rejected
            self.counters.catchup_tokens += facts.catchup_tokens
            self.counters.catchup_seconds += facts.catchup_seconds
            if facts.catchup_tokens > 0 and facts.catchup_seconds > 0.0:
                spent = facts.catchup_seconds / facts.catchup_tokens
                self._per_catchup_token_s += 0.3 * (spent - self._per_catchup_token_s)
        if seen.prefill_tokens > 0 and seen.batch_size == 0:
            spent = seen.seconds / seen.prefill_tokens
            self.prefill_token_s += 0.1 * (spent - self.prefill_token_s) if self.prefill_token_s else spent
        if self.planner is not None:
            self._observe(seen)
            if self.journal is not None:
                self.journal.write("step", {**msgspec.to_builtins(seen), "draft_forwards": self._draft_forwards()})
            self._log()

    def _observe(self, seen: Observation) -> None:
        """A step no policy can learn from, such as one that took an hour, is counted and does no harm."""
        assert self.planner is not None, "only rank 0 learns"
        try:
            self.planner.observe(seen)
        except ValueError as error:
            if self.counters.refused_steps == 0:
                logger.warning("the policy refuses a step, and those that follow without a word: %s", error)
            self.counters.refused_steps += 1

    def report(self) -> dict[str, Any]:
        """For `/server_info`."""
        counters = self.counters
        channel = asdict(self.channel.events) if isinstance(self.channel, Coordinator) else None
        return {
            "gamma": self.gamma,
            "directive": self.directive.step,
            "steps_by_gamma": list(counters.steps_by_gamma),
            "switches": counters.switches,
            "accept_length": counters.committed / counters.drafted if counters.drafted else None,
            "rejected_drafts": counters.rejected,
            "draft_forwards": self._draft_forwards(),
            "catchup_tokens": counters.catchup_tokens,
            "catchup_seconds": counters.catchup_seconds,
            "refused_steps": counters.refused_steps,
            "channel": channel,
            "memory": None if self.memory is None else self.memory.report(),
        }

    def _draft_forwards(self) -> int:
        return self.worker.draft_forwards if self.worker is not None else 0

    def _catchup_tokens(self) -> int:
        return max(int(self.catchup_budget_s / self._per_catchup_token_s), _LEAST_CATCHUP)

    def _log(self) -> None:
        now = self.clock()
        if now - self._logged_s < _LOG_EVERY_S:
            return
        counters = self.counters
        state = (counters.switches, sum(counters.steps_by_gamma))
        if state[0] != self._logged[0]:
            logger.info(
                "Nightjar: gamma %d; %d switches in the last %d steps; steps by gamma %s; %d catch-up tokens",
                self.gamma,
                state[0] - self._logged[0],
                state[1] - self._logged[1],
                counters.steps_by_gamma,
                counters.catchup_tokens,
            )
            self._logged = state
        self._logged_s = now


_current: Controller | None = None


def current() -> Controller | None:
    """The controller of this process; None in one that never speculates."""
    return _current


def start(config: NightjarConfig, *, rank: int, max_gamma: int, ranks: int = 1) -> Controller:
    """Makes the controller of this rank.

    Args:
        max_gamma: the largest gamma the server has buffers for, at most `config.max_gamma`.
        ranks: of the server; several talk over ZMQ in the private folder the launcher has made.
    """
    global _current
    spec = config.policy_spec()
    slo_s = config.tpot_slo_ms / 1e3 if config.tpot_slo_ms > 0 else None
    planner = None
    if rank == 0:
        planner = Planner(make_policy(spec, PolicyOptions(max_gamma, config.seed, slo_s)))
    _current = Controller(
        planner=planner,
        max_gamma=max_gamma,
        constant=spec.gamma if spec.fixed else None,
        initial_gamma=spec.gamma if spec.fixed else min(FIRST_GAMMA, max_gamma),
        catchup_budget_s=config.catchup_budget_ms / 1e3,
        journal=Journal(config.journal_path, rank) if config.journal else None,
        channel=_open_channel(rank, ranks),
    )
    return _current


def _open_channel(rank: int, ranks: int) -> Coordinator | Agent:
    if ranks == 1:
        return Coordinator(NoTransport(), 1, time.monotonic)
    transport = ZmqTransport(endpoint_in(run_folder()), rank)
    if rank == 0:
        return Coordinator(transport, ranks, time.monotonic)
    return Agent(transport, rank, lambda asked: "the memory of this rank is not elastic")

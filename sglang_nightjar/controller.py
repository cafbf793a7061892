"""One per rank: rank 0 asks the planner, every rank carries out the same directive.

The scheduler's hooks (`patches/lockstep.py`, `patches/outcome.py`) and the worker call it once per
iteration: `propose` on rank 0 gives the bytes to broadcast, `apply` on every rank puts them in force,
`launched` writes down the step made under them, and `finished` reports its outcome, from which rank 0's policy
learns. With overlap scheduling the outcome comes when the next step has been decided and launched.
"""

import logging
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from sglang_nightjar.attribution import InFlight, Launched, SynchronousClock
from sglang_nightjar.coordination.agent import Agent
from sglang_nightjar.coordination.coordinator import Coordinator
from sglang_nightjar.coordination.messages import Directive, Turn, decode, encode
from sglang_nightjar.elastic import Elastic
from sglang_nightjar.observe import per_request
from sglang_nightjar.observe.counters import Counters, HitRate, StepFacts
from sglang_nightjar.observe.journal import Journal
from sglang_nightjar.policy.base import Decision, Observation, Residency, State
from sglang_nightjar.policy.planner import Planner

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
        flight: the steps it has launched whose outcome has not arrived.
        channel: the asynchronous side: rank 0's coordinator, another rank's agent.
        constant: gamma of a policy that never chooses another; such a policy is asked when gamma must be
            restored and not otherwise.
        elastic: whether the draft may leave; `memory` is how, once the pools are made.
        draft_bytes: that leave with the draft: its weights, and its KV per slot.
        prefill_token_s: seconds to compute one prompt token, as lately measured.
        hits: how much of the prompts the radix cache has served lately.
        speed: emulated seconds per second; 1 unless the device is emulated. All times here are emulated.
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
    speed: float = 1.0
    prefill_token_s: float = 0.0
    hits: HitRate = field(default_factory=HitRate)
    flight: InFlight = field(default_factory=lambda: InFlight(SynchronousClock()))
    directive: Directive = field(init=False)
    counters: Counters = field(init=False)
    _per_catchup_token_s: float = 1e-3  # until a catch-up has been timed
    _digest: int = 0  # of every directive so far
    _decided_for: int = 0  # batch size of the last decision; 0 once a step has used it
    _asked_for: int = 0  # the batch size to come by which the last directive was made; 0: by the present one
    _prefill_missed: bool = False  # requests were said to join, and a decode step came all the same
    _logged_s: float = float("-inf")
    _logged: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.directive = Directive(0, 0, self.initial_gamma, self._catchup_tokens())
        self.counters = Counters([0] * (self.max_gamma + 1))

    @property
    def gamma(self) -> int:
        return self.directive.gamma

    def reserve(self) -> int:
        """KV slots a request needs beyond the tokens it is known to have: for the coming decode step the bonus token's
        and its drafts', and for what it may have committed in a step whose outcome has not arrived."""
        return self.flight.uncounted + self.directive.gamma + 1

    @property
    def residency(self) -> Residency:
        return Residency.RESIDENT if self.memory is None else self.memory.residency

    @property
    def moving(self) -> bool:
        """Whether the draft is on its way, so that the loop must not sleep."""
        return self.memory is not None and self.memory.moving

    @property
    def reads_prompts(self) -> bool:
        """Whether the draft reads what is prefilled now."""
        return self.gamma > 0 and self.directive.read_prompts

    @property
    def judges_prompts(self) -> bool:
        """Whether rank 0 is to be told of requests about to join."""
        return self.planner is not None and self.planner.judges_prompts

    def wants_decision(self, batch_size: int, joining: int = 0) -> bool:
        """Whether a directive is due: a memory transition goes on, or the coming step needs a new decision
        (the last one is used up, or the batch is another, or will be by other requests that join it)."""
        if self.planner is None:
            return False
        if self.memory is not None and self.memory.due:
            return True
        if joining and not self._prefill_missed:
            return batch_size + joining != self._asked_for
        return batch_size > 0 and batch_size != self._decided_for and not self._settled()

    def _settled(self) -> bool:
        """Whether the policy would say what is in force anyway, and nobody records that it was asked."""
        wanted = self.constant if self.residency is Residency.RESIDENT else 0
        return self.constant is not None and self.journal is None and self.directive.step > 0 and self.gamma == wanted

    def propose(self, state: State | None, after: State | None = None) -> bytes:
        """Rank 0: decides, and returns the bytes every rank must `apply`.

        `state`: None where nothing decodes. `after`: as it will be when the requests about to be prefilled
        decode too; None where there are none, or nobody asked (`judges_prompts`). Those prefills come first,
        so that no gamma is chosen for a batch that will not decode; but for once they did not.
        """
        assert self.planner is not None, "only rank 0 decides"
        decision = Decision(self.gamma)
        step = self.directive.step + 1
        if state is not None and (after is None or self._prefill_missed):
            decision = self.planner.decide(state)
            self._decided_for = state.batch_size
            if self.journal is not None:
                self.journal.write("state", state)
        read = after is None or self.planner.reads_prompts(after)
        self._asked_for = 0 if after is None else after.batch_size
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
        return encode(Directive(epoch, step, gamma, self._catchup_tokens(), budget, turn, slots, keep, read))

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
        if directive.turn is not Turn.NONE:
            self._record_memory(directive.turn)

    def poll(self, idle: bool) -> None:
        """Every rank, every iteration, between steps: reads the asynchronous channel, goes on with what moves.
        Never waits. `idle`: nothing runs and nothing waits."""
        if self.channel is not None:
            self.channel.poll()
        if self.memory is not None:
            slots = self.memory.memory.slots
            self.memory.iterate(idle, self.directive.step + 1)
            if self.memory.memory.slots != slots:
                self._record_memory(Turn.NONE)

    def _record_memory(self, turn: Turn) -> None:
        """The journal's `memory`: after every `turn`, and when the pool has shrunk between two."""
        if self.journal is not None and self.memory is not None:
            self.journal.write("memory", {"now_s": self.clock(), "turn": turn, **self.memory.report()})

    def refusal(self, turn: Turn) -> str | None:
        """Why the draft cannot make `turn` now, or None."""
        return "the memory of this server is not elastic" if self.memory is None else self.memory.refusal(turn)

    def want(self, turn: Turn) -> None:
        """An operator wants the draft moved; rank 0 sees to it."""
        if self.memory is not None:
            self.memory.want(turn, self.directive.step + 1, by_hand=True)

    def launched(self, number: int, facts: StepFacts | None, *, began_s: float, after_idle: bool) -> None:
        """Every rank: the worker has made a step under the directive in force.

        Args:
            number: SGLang's of the forward.
            facts: what it did; None for a prefill.
            began_s: when its launch began, on `clock`. `after_idle`: nothing was under way before.
        """
        self._prefill_missed = facts is not None and self._asked_for > 0
        if facts is not None:
            self._decided_for = 0
        self.flight.launch(
            number,
            directive=self.directive.step,
            gamma=self.gamma if facts is not None or self.reads_prompts else 0,
            facts=facts,
            draft_forwards=self._draft_forwards(),
            began_s=began_s,
            ended_s=self.clock(),
            after_idle=after_idle,
        )

    def finished(self, seen: Observation, step: Launched) -> None:
        """Every rank: the outcome of `step` has arrived."""
        facts = step.facts
        if facts is not None:
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
                launched = {"number": step.number, "directive": step.directive, "draft_forwards": step.draft_forwards}
                so_far = {"now_s": self.clock(), "arrived": self.counters.arrived, "retracted": self.counters.retracted}
                self.journal.write("step", {**msgspec.to_builtins(seen), **launched, **so_far})
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

    def begin_stories(self, reqs: list[Any]) -> None:
        """The prompts of `reqs` are being computed."""
        per_request.begin(reqs, *self._tally())

    def story_of(self, req: Any) -> dict[str, Any]:
        """What a finished request saw, for its `meta_info`."""
        return per_request.tell(req, self.gamma, *self._tally())

    def _tally(self) -> tuple[int, int, int]:
        return self.counters.switches, self._draft_forwards(), self.counters.catchup_tokens

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
            "drafted": counters.drafted,
            "committed": counters.committed,
            "rejected_drafts": counters.rejected,
            "draft_forwards": self._draft_forwards(),
            "catchup_tokens": counters.catchup_tokens,
            "catchup_seconds": counters.catchup_seconds,
            "refused_steps": counters.refused_steps,
            "arrived": counters.arrived,
            "retracted": counters.retracted,
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


def make_current(own: Controller) -> None:
    """`own` is the controller of this process from now on."""
    global _current
    _current = own

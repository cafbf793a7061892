"""The simulated server: one loop over prefill and decode steps, as SGLang's scheduler does them."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from sglang_nightjar.errors import UserError
from sglang_nightjar.policy.base import Decision, Observation, Residency, State, StepKind
from sglang_nightjar.simulate.acceptance import Acceptance, AcceptanceSpec
from sglang_nightjar.simulate.admission import Admission, Prompt
from sglang_nightjar.simulate.clients import Clients
from sglang_nightjar.simulate.elastic import ElasticPool
from sglang_nightjar.simulate.protocols import Cost, Planner, ServerOptions
from sglang_nightjar.simulate.record import Record
from sglang_nightjar.simulate.running import Commitment, Running, catch_up
from sglang_nightjar.simulate.workload import Work

_NOISE = 1 << 14  # step-time factors drawn once and used in turn
_NOTHING = Commitment()


class Server:
    """Serves `work` once; `run` returns what happened. All randomness comes from `seed`."""

    def __init__(
        self,
        cost: Cost,
        work: Work,
        planner: Planner,
        acceptance: AcceptanceSpec,
        options: ServerOptions,
        seed: int,
        *,
        warmup_s: float = 0.0,
        stop_s: float = float("inf"),
    ) -> None:
        """`warmup_s`, `stop_s`: the window in which throughput is counted; a closed loop sends nothing after it."""
        self._cost, self._work, self._planner, self._options = cost, work, planner, options
        self._pool = ElasticPool(
            cost, evict_s=options.evict_s, move_s=options.move_s, margin=options.margin, evicted=options.start_evicted
        )
        # Longer requests are refused under every policy alike: what fits the pool beside the draft is the limit.
        longest = self._pool.small - cost.max_gamma - 1
        if longest < 1:
            raise UserError("the set-up has no room for KV slots beside the weights of target and draft")
        count = len(work.prompt)
        rng = np.random.default_rng([seed, 0x5EED])
        self._alpha = acceptance.draw(count, rng)
        self._acceptance = Acceptance(acceptance, cost.max_gamma, seed)
        self._starts = self._acceptance.starts(count)
        self._noise = np.exp(rng.standard_normal(_NOISE) * options.time_noise).tolist()
        self._noise_index = 0
        self._run = Running(options.max_running)
        self._admission = Admission(options, work.prompt, work.output)
        self._used = 0  # KV slots
        self._kv = 0  # those of decoding requests; the rest of `_used` is being prefilled
        self._gamma = 0
        self.now_s = 0.0
        self.record = Record(work, cost.max_gamma, warmup_s, stop_s)
        self._clients = Clients(work, longest, stop_s, self.record)

    def run(self) -> Record:
        """Runs until every request is answered."""
        self._arrive(self._clients.begin())
        while True:
            self._arrive(self._clients.arrived(self.now_s))
            self._pool.advance(self.now_s)
            completed, tokens, taken = self._admission.next_chunk(
                self._run, self._used, self._pool.total, self._gamma + 1
            )
            self._used += taken
            if tokens and not (self._options.mixed and self._run.count):
                self._prefill(completed, tokens)
            elif self._run.count:
                self._decode(completed, tokens)
            elif (next_s := self._clients.next_s()) is not None:
                self.now_s = max(self.now_s, next_s)
            else:
                break
        if self._used or len(self._admission):
            raise RuntimeError(f"{self._used} KV slots and {len(self._admission)} requests are left over")
        self.record.finish(self.now_s, self._pool)
        return self.record

    def _arrive(self, requests: list[int]) -> None:
        for request in requests:
            self._admission.arrive(request)

    def _end(self, request: int) -> None:
        self.record.finish_s[request] = self.now_s
        self._arrive(self._clients.answered(self.now_s))

    # Prefill

    def _prefill(self, completed: list[Prompt], tokens: int) -> None:
        # At gamma 0 the server runs no draft forward at all, so the draft does not see the prompt either.
        draft_reads = self._gamma > 0 and self._pool.residency is Residency.RESIDENT
        draft_reads = draft_reads and self._planner.reads_prompts(self._state_after(completed))
        seconds = self._cost.prefill_s(tokens, float(tokens), draft_reads) * self._jitter()
        self.now_s += seconds
        self.record.prefill_steps += 1
        self._begin_decoding(completed, draft_reads)
        self._tell(StepKind.PREFILL, seconds, prefill_tokens=tokens)

    def _begin_decoding(self, completed: list[Prompt], draft_read: bool) -> None:
        """The last forward over each prompt also gave its next token."""
        for part in completed:
            request, generated = part.request, part.generated + 1
            remaining = int(self._work.output[request]) - generated
            if part.generated == 0:
                self.record.first_s[request] = self.now_s
            self.record.add_tokens(1, self.now_s)
            if remaining == 0:
                self._used -= part.tokens
                self._end(request)
                continue
            lag = 0 if draft_read else part.tokens
            place = int(self._starts[request]) + generated
            self._run.add(request, part.tokens, generated, remaining, lag, place, float(self._alpha[request]))
            self._kv += part.tokens

    def _jitter(self) -> float:
        self._noise_index = (self._noise_index + 1) & (_NOISE - 1)
        return float(self._noise[self._noise_index])

    # Decode

    def _decode(self, completed: list[Prompt], prefill_tokens: int) -> None:
        run, pool, cost = self._run, self._pool, self._cost
        max_lag = int(run.lag.max())
        decision = self._planner.decide(self._state(max_lag))
        gamma = decision.gamma
        if not 0 <= gamma <= cost.max_gamma or (gamma > 0 and pool.residency is not Residency.RESIDENT):
            raise ValueError(f"the planner chose gamma {gamma} while the draft is {pool.residency.name}")
        pause = pool.move(decision.move, self.now_s, self._used) if decision.move else 0.0
        if pool.residency is Residency.EVICTING:
            gamma = 0
            run.lag[:] = run.context  # its KV is gone
        self._gamma = gamma
        self._make_room(gamma + 1)

        batch, kv = run.count, self._kv
        drafting: npt.NDArray[np.bool_] | None = None  # None: all, or none at gamma 0
        drafters = batch if gamma else 0
        caught, catchup = 0, 0.0
        if gamma and max_lag:
            caught = catch_up(run.lag, self._options.catchup_budget)
            catchup = cost.catchup_s(caught, float(kv))
            drafting = run.lag == 0
            drafters = int(np.count_nonzero(drafting))
            if drafters == batch:
                drafting = None
        committed, verified = self._commitment(gamma, drafters, drafting, decision)
        step = cost.step_s(
            batch, gamma, float(kv), drafters=drafters, verify_tokens=batch + verified, prefill_tokens=prefill_tokens
        )
        draft_reads = gamma > 0 and prefill_tokens > 0
        if draft_reads:
            step += cost.catchup_s(prefill_tokens, float(prefill_tokens))
        jitter = self._jitter()
        seconds = (step + catchup + pause) * jitter
        self.now_s += seconds
        done = run.commit(committed, gamma, drafting)
        self._used += done.tokens - done.freed
        self._kv += done.tokens - done.freed
        for request in done.ended:
            self._end(request)
        self._begin_decoding(completed, draft_reads)
        record = self.record
        record.catchup_tokens += caught
        record.catchup_s += catchup * jitter
        record.step(self.now_s, seconds, batch, gamma, done.tokens, len(self._admission), pool, self._used)
        kind = StepKind.MIXED if prefill_tokens else StepKind.DECODE
        self._tell(kind, seconds, batch, done, drafters, prefill_tokens, kv, caught, catchup * jitter)

    def _commitment(
        self, gamma: int, drafters: int, drafting: npt.NDArray[np.bool_] | None, decision: Decision
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Tokens each request commits, [batch], before its end cuts them; draft tokens verified."""
        run = self._run
        committed = np.ones(run.count, np.int64)
        if drafters == 0:
            return committed, 0
        budget = decision.verify_budget
        if drafting is None:
            accepted, verified = self._acceptance.accepted(run.position, run.alpha, gamma, self.now_s, budget)
            committed += accepted
        else:
            place, alpha = run.position[drafting], run.alpha[drafting]
            accepted, verified = self._acceptance.accepted(place, alpha, gamma, self.now_s, budget)
            committed[drafting] += accepted
        return committed, verified

    def _make_room(self, per_request: int) -> None:
        """Retracts the youngest requests until each of the others can write `per_request` tokens."""
        run = self._run
        while self._used + run.count * per_request > self._pool.total:
            if run.count > 1:
                request, context, generated = run.pop()
                self._used -= context
                self._kv -= context
                self._admission.retract(request, generated)
                self.record.preemptions += 1
            else:
                # One request always fits alone; only a half-read prompt can be in its way.
                freed = self._admission.drop_half_read()
                if freed == 0:
                    break
                self._used -= freed

    # What the planner sees

    def _state(self, max_lag: int) -> State:
        pool = self._pool
        return State(
            now_s=self.now_s,
            batch_size=self._run.count,
            kv_tokens=self._kv,
            free_slots=max(0, pool.total - self._used),
            total_slots=pool.total,
            queue_length=len(self._admission),
            queue_blocked=self._admission.blocked,
            max_lag=max_lag,
            residency=pool.residency,
        )

    def _state_after(self, completed: list[Prompt]) -> State:
        """What the planner would see if `completed`, and those that wait and are not blocked, decoded too."""
        now = self._state(0)
        joining = len(completed) + (0 if self._admission.blocked else len(self._admission))
        return replace(
            now,
            batch_size=max(min(now.batch_size + joining, self._options.max_running), 1),
            kv_tokens=now.kv_tokens + sum(part.tokens for part in completed),
            queue_length=0,
        )

    def _tell(
        self,
        kind: StepKind,
        seconds: float,
        batch: int = 0,
        done: Commitment = _NOTHING,
        drafted: int = 0,
        prefill_tokens: int = 0,
        kv_tokens: int = 0,
        catchup_tokens: int = 0,
        catchup_seconds: float = 0.0,
    ) -> None:
        """Observation of the step just done; the server's state is that after it."""
        pool = self._pool
        self._planner.observe(
            Observation(
                kind,
                batch,
                self._gamma,
                done.histogram,
                seconds,
                done.cut,
                done.cut_tokens,
                drafted,
                prefill_tokens,
                kv_tokens,
                max(0, pool.total - self._used),
                pool.total,
                len(self._admission),
                int(self._run.lag.max()) if self._run.count else 0,
                pool.residency,
                catchup_tokens,
                catchup_seconds,
            )
        )

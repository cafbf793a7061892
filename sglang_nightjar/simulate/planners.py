"""Planners by name.

Those of `policy/registry.py`, the oracle, and a few names for how the server is run. Everything
else asks `make_planner`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_nightjar.errors import UserError
from sglang_nightjar.policy import registry
from sglang_nightjar.policy.base import Policy, State
from sglang_nightjar.policy.planner import Planner as PolicyPlanner
from sglang_nightjar.policy.registry import KNOWN_POLICIES, PolicyOptions, parse_policy
from sglang_nightjar.simulate.acceptance import AcceptanceSpec, harmonic_tokens, mean_alpha
from sglang_nightjar.simulate.protocols import Cost, Planner


@dataclass(frozen=True, slots=True)
class Context:
    """What a policy may be built from; only the oracle looks at the last three.

    Attributes:
        max_gamma: largest gamma. seed: of the policy's own randomness.
        cost: the truth about step times. acceptance: the truth about acceptance.
        mean_output: mean output tokens of a request.
    """

    max_gamma: int
    seed: int
    cost: Cost
    acceptance: AcceptanceSpec
    mean_output: float


def true_loss(context: Context) -> Callable[[State, int, int], float]:
    """Expected seconds per committed token of (state, gamma, previous gamma), for the oracle.

    A catch-up is spread over the tokens the running requests still have to generate, half of their
    mean output on average: that is how long what the draft has read stays of use.
    """
    cost, spec = context.cost, context.acceptance
    alphas = mean_alpha(spec)
    tables: dict[float, list[float]] = {}

    def tokens(gamma: int, now_s: float) -> float:
        scale = round(spec.scale(now_s), 2)
        table = tables.get(scale)
        if table is None:
            scaled = (alphas * scale).clip(0.0, 1.0)
            arms = range(context.max_gamma + 1)
            # Requests that accept little stay longer, so a running batch has more of them: the harmonic mean.
            table = tables[scale] = [harmonic_tokens(scaled, arm, spec.position_decay) for arm in arms]
        return table[gamma]

    def loss(state: State, gamma: int, previous: int) -> float:
        batch, kv = state.batch_size, float(state.kv_tokens)
        seconds = cost.step_s(batch, gamma, kv) / (batch * tokens(gamma, state.now_s))
        if gamma > 0 and previous == 0:
            lagging = min(state.max_lag * batch, state.kv_tokens)
            seconds += cost.catchup_s(lagging, kv) / (batch * max(context.mean_output / 2, 1.0))
        return seconds

    return loss


def _oracle(context: Context) -> Policy:
    from sglang_nightjar.policy.baselines.oracle import Oracle

    return Oracle(context.max_gamma, true_loss(context))


def _with_residency(context: Context, policy: Policy) -> Planner:
    from sglang_nightjar.policy.nightjar import NightjarPolicy
    from sglang_nightjar.policy.residency import ResidencyCosts, ResidencyPlanner

    assert isinstance(policy, NightjarPolicy)
    cost = context.cost
    small, large = cost.slots(True), cost.slots(False)
    costs = ResidencyCosts(small, large, pause_s=cost.relocate_s(small * 0.1), reload_s=cost.reload_s())
    return PolicyPlanner(policy, ResidencyPlanner(policy.model, costs))


# Names of the simulator's own: the registered policy behind each. What they add is how the server is run.
_ALIASES = {
    # `off` on a server that never loaded a draft: see `starts_without_draft`.
    "no-draft": "off",
    # The draft never leaves: what elastic memory adds to `nightjar` is the difference.
    "nightjar-fixed": "nightjar",
}
# Names whose planner decides residency too; the maker wraps the policy of the same name.
_ELASTIC: dict[str, Callable[[Context, Policy], Planner]] = {"nightjar": _with_residency}
_MOST_GAMMA = 16  # a name is checked before the set-up, and its largest gamma, is known
BASELINES = ("sglang-ema", "dsd", "banditspec-ucb", "banditspec-exp3", "tetris")


def check_name(name: str) -> str:
    """`name` itself; `UserError` where no planner has it."""
    if name not in _ALIASES and name != "oracle":
        try:
            parse_policy(name, max_gamma=_MOST_GAMMA)
        except UserError as error:
            raise UserError(f"{error}, {', '.join((*_ALIASES, 'oracle'))}") from None
    return name


def starts_without_draft(name: str) -> bool:
    """Whether the server of this planner has its whole memory for KV from the start."""
    return name == "no-draft"


def known(names: Sequence[str]) -> list[str]:
    """Those of `names` that exist."""
    return [name for name in names if name.partition(":")[0] in (*KNOWN_POLICIES, *_ALIASES, "oracle")]


def default_subject(names: Sequence[str]) -> str:
    """Whom a suite judges: `nightjar` where it takes part, else the first of `names`."""
    return "nightjar" if "nightjar" in names else names[0]


def make_policy(name: str, context: Context) -> Policy:
    """The policy called `name`, such as `off`, `static:3`, `oracle`; it decides gamma only."""
    if name == "oracle":
        return _oracle(context)
    spec = parse_policy(_ALIASES.get(name, name), max_gamma=context.max_gamma)
    return registry.make_policy(spec, PolicyOptions(context.max_gamma, context.seed))


def make_planner(name: str, context: Context) -> Planner:
    """The planner called `name`: its policy and, where that has one, its residency manager."""
    policy = make_policy(name, context)
    wrap = _ELASTIC.get(name)
    return wrap(context, policy) if wrap else PolicyPlanner(policy)

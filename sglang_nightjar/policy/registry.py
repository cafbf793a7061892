"""Policies by name, as users write them: `nightjar`, `off`, `static:3`."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from sglang_nightjar.errors import UserError
from sglang_nightjar.policy.base import Policy

DEFAULT_POLICY = "nightjar"
FIRST_GAMMA = 3  # of policies that learn, before they have decided anything


class PolicySpec(msgspec.Struct, frozen=True):
    """A parsed policy.

    Attributes:
        name: without its argument.
        gamma: the largest gamma it can choose; 0 means it never speculates.
        steps: of `random`, most steps between two switches; 0 for its default.
    """

    name: str
    gamma: int
    steps: int = 0

    @property
    def fixed(self) -> bool:
        """Whether it always chooses the same gamma."""
        return self.name in ("off", "static")

    @property
    def estimates(self) -> bool:
        """Whether it can say what moving the draft would bring (`residency.Estimates`)."""
        return self.name == "nightjar"


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What any policy is built from. `tpot_slo_s`: seconds per token of a request that users accept."""

    max_gamma: int
    seed: int = 0
    tpot_slo_s: float | None = None


def parse_policy(text: str, *, max_gamma: int) -> PolicySpec:
    """Parses a policy's name and argument; `UserError` says what is wrong.

    `static:N` needs N, 0 <= N <= `max_gamma`; `tetris:N` (tokens drafted) and `random:N` (steps between
    switches, at most) may have one.
    """
    name, colon, argument = text.partition(":")
    if name not in _MAKERS or (colon and name not in _TAKES_NUMBER):
        raise UserError(f"unknown policy {text!r}; known policies: {', '.join(KNOWN_POLICIES)}")
    if name == "tetris" and max_gamma < 2:
        raise UserError("policy 'tetris' drafts at least 2 tokens; raise --nightjar-max-gamma")
    if not colon and name != "static":
        most = {"off": 0, "tetris": min(FIRST_GAMMA, max_gamma)}
        return PolicySpec(name, most.get(name, max_gamma))
    if not re.fullmatch(r"[+-]?[0-9]+", argument):
        raise UserError(f"policy {text!r} needs a whole number after the colon, for example {name}:3")
    number = int(argument)
    if name == "random":
        if number < 1:
            raise UserError(f"policy {text!r}: the number of steps between switches must be at least 1")
        return PolicySpec(name, max_gamma, number)
    if number < 0:
        raise UserError(f"policy {text!r}: gamma must not be negative; use static:0 or off for no speculation")
    if name == "tetris" and number < 2:
        raise UserError(f"policy {text!r}: it drafts at least 2 tokens, of which the less likely are not verified")
    if number > max_gamma:
        raise UserError(f"policy {text!r}: gamma exceeds --nightjar-max-gamma {max_gamma}; raise it or lower gamma")
    return PolicySpec(name, number)


def make_policy(spec: PolicySpec, options: PolicyOptions) -> Policy:
    """The policy `spec` stands for."""
    return _MAKERS[spec.name](spec, options)


# Imports are inside: reading a command line needs the names only, and numpy takes a while.


def _fixed(spec: PolicySpec, options: PolicyOptions) -> Policy:
    from sglang_nightjar.policy.baselines.fixed import Fixed

    return Fixed(spec.gamma, options.max_gamma)


def _nightjar(spec: PolicySpec, options: PolicyOptions) -> Policy:
    from sglang_nightjar.policy.nightjar import NightjarPolicy
    from sglang_nightjar.policy.nightjar_settings import NightjarSettings

    settings = NightjarSettings(tpot_slo_s=options.tpot_slo_s, first_gamma=FIRST_GAMMA)
    return NightjarPolicy(options.max_gamma, seed=options.seed, settings=settings)


def _paper(spec: PolicySpec, options: PolicyOptions) -> Policy:
    from sglang_nightjar.policy.paper import PaperPolicy

    return PaperPolicy(options.max_gamma, seed=options.seed)


def _sglang_ema(spec: PolicySpec, options: PolicyOptions) -> Policy:
    from sglang_nightjar.policy.baselines.sglang_ema import SglangEma

    return SglangEma(options.max_gamma)


def _dsd(spec: PolicySpec, options: PolicyOptions) -> Policy:
    from sglang_nightjar.policy.baselines.dsd import Dsd

    return Dsd(options.max_gamma)


def _banditspec_ucb(spec: PolicySpec, options: PolicyOptions) -> Policy:
    from sglang_nightjar.policy.baselines.banditspec import UcbSpec

    return UcbSpec(options.max_gamma)


def _banditspec_exp3(spec: PolicySpec, options: PolicyOptions) -> Policy:
    from sglang_nightjar.policy.baselines.banditspec import Exp3Spec

    return Exp3Spec(options.max_gamma, seed=options.seed)


def _tetris(spec: PolicySpec, options: PolicyOptions) -> Policy:
    from sglang_nightjar.policy.baselines.tetris import Tetris

    return Tetris(spec.gamma, options.max_gamma)


def _random(spec: PolicySpec, options: PolicyOptions) -> Policy:
    from sglang_nightjar.policy.baselines.random_switch import RandomSwitch

    return RandomSwitch(options.max_gamma, seed=options.seed, longest=spec.steps or 4)


_MAKERS: dict[str, Callable[[PolicySpec, PolicyOptions], Policy]] = {
    "nightjar": _nightjar,
    "paper": _paper,
    "off": _fixed,
    "static": _fixed,
    "sglang-ema": _sglang_ema,
    "dsd": _dsd,
    "banditspec-ucb": _banditspec_ucb,
    "banditspec-exp3": _banditspec_exp3,
    "tetris": _tetris,
    "random": _random,
}
_TAKES_NUMBER = ("static", "tetris", "random")
KNOWN_POLICIES = tuple(f"{name}:N" if name == "static" else name for name in _MAKERS)

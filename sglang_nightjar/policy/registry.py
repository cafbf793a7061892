"""Policy names as users write them: `off`, `static:3`."""

import re

import msgspec

from sglang_nightjar.errors import UserError

KNOWN_POLICIES = ("off", "static:N")


class PolicySpec(msgspec.Struct, frozen=True):
    """A parsed policy: its name and, for `static`, the fixed gamma (0 means no speculation)."""

    name: str
    gamma: int


def parse_policy(text: str, *, max_gamma: int) -> PolicySpec:
    """Parses `off` or `static:N` with 0 <= N <= `max_gamma`; `UserError` says what is wrong."""
    if text == "off":
        return PolicySpec("off", 0)
    name, _, argument = text.partition(":")
    if name != "static":
        raise UserError(f"unknown policy {text!r}; known policies: {', '.join(KNOWN_POLICIES)}")
    if not re.fullmatch(r"[+-]?[0-9]+", argument):
        raise UserError(f"policy {text!r} needs a whole number after the colon, for example static:3")
    gamma = int(argument)
    if gamma < 0:
        raise UserError(f"policy {text!r}: gamma must not be negative; use static:0 or off for no speculation")
    if gamma > max_gamma:
        raise UserError(f"policy {text!r}: gamma exceeds --nightjar-max-gamma {max_gamma}; raise it or lower gamma")
    return PolicySpec("static", gamma)

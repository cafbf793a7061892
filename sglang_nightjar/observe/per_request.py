"""What one request saw of speculation, for the `meta_info` of its answer."""

from dataclasses import dataclass
from typing import Any

_NAME = "nightjar_story"  # the attribute of SGLang's request that carries it


@dataclass(slots=True)
class Story:
    """Attributes:

    drafted, tokens: how often the request drafted, and the tokens it committed in those steps.
    switches, draft_forwards, catchup_tokens: the server's counts when its prompt was first computed.
    """

    switches: int
    draft_forwards: int
    catchup_tokens: int
    drafted: int = 0
    tokens: int = 0


def begin(reqs: list[Any], switches: int, draft_forwards: int, catchup_tokens: int) -> None:
    """Starts the stories of those that have none; one that is prefilled in chunks or again goes on with its own."""
    for req in reqs:
        if not hasattr(req, _NAME):
            setattr(req, _NAME, Story(switches, draft_forwards, catchup_tokens))


def add_step(reqs: list[Any], drafted: list[bool], committed: list[int]) -> None:
    """A speculative step: which of `reqs` drafted, and the tokens each committed."""
    for req, has_drafted, tokens in zip(reqs, drafted, committed, strict=True):
        if has_drafted:
            story = getattr(req, _NAME)
            story.drafted += 1
            story.tokens += tokens


def tell(req: Any, gamma: int, switches: int, draft_forwards: int, catchup_tokens: int) -> dict[str, Any]:
    """The entry of a finished request.

    `gamma`: in force now. `accept_length`: tokens it committed per step in which it drafted, or None.
    The others count what the server did from its first prefill on, for all requests together.
    """
    story = getattr(req, _NAME, None)
    if story is None:  # aborted before its prompt was computed
        story = Story(switches, draft_forwards, catchup_tokens)
    return {
        "gamma": gamma,
        "accept_length": story.tokens / story.drafted if story.drafted else None,
        "speculative_steps": story.drafted,
        "switches": switches - story.switches,
        "draft_forwards": draft_forwards - story.draft_forwards,
        "catchup_tokens": catchup_tokens - story.catchup_tokens,
    }

"""`Engine`: the in-process twin of `sglang.Engine`, with Nightjar underneath."""

from typing import Any

from sglang_nightjar.config import make_config
from sglang_nightjar.serving.startup import activate, guard_requests, server_options

_PREFIX = "nightjar_"


def Engine(**options: Any) -> Any:  # noqa: N802 - named like the class it stands for
    """Starts an engine and returns it; every method is `sglang.Engine`'s.

    Like SGLang's, it starts processes that import the calling script anew: call it below
    `if __name__ == "__main__":`. `shutdown()` ends them.

    Args:
        options: SGLang's `ServerArgs` fields, and Nightjar's own options as `nightjar_policy="static:3"`
            and so on. Without `model_path` it serves the demo pair.
    Raises:
        UserError: an option is unknown, contradictory or not supported; the message says what to change.
    """
    ours = {name.removeprefix(_PREFIX): value for name, value in options.items() if name.startswith(_PREFIX)}
    theirs = {name: value for name, value in options.items() if not name.startswith(_PREFIX)}
    config = make_config(ours)
    activate(config, ranks=theirs.get("tp_size") or 1)

    complete = server_options(config, theirs)

    from sglang.srt.entrypoints.engine import Engine as UpstreamEngine

    guard_requests(config)
    return UpstreamEngine(**complete)

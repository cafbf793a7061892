"""`Engine`: the in-process twin of `sglang.Engine`, with Nightjar underneath."""

from typing import Any

from sglang_nightjar.config import make_config
from sglang_nightjar.serving.startup import activate, server_options

_PREFIX = "nightjar_"


def Engine(**options: Any) -> Any:  # noqa: N802 - named like the class it stands for
    """Starts an engine and returns it; every method is `sglang.Engine`'s.

    Args:
        options: SGLang's `ServerArgs` fields, and Nightjar's own options as `nightjar_policy="static:3"`
            and so on. Without `model_path` it serves the demo pair.
    Raises:
        UserError: an option is unknown, contradictory or not supported; the message says what to change.
    """
    ours = {name.removeprefix(_PREFIX): value for name, value in options.items() if name.startswith(_PREFIX)}
    theirs = {name: value for name, value in options.items() if not name.startswith(_PREFIX)}
    config = make_config(**ours)
    activate(config, ranks=theirs.get("tp_size", 1))

    from sglang.srt.entrypoints.engine import Engine as UpstreamEngine

    return UpstreamEngine(**server_options(config, theirs))

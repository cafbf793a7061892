"""The two entry points SGLang calls in every process it starts.

Both return at once unless this process belongs to a Nightjar server: the launcher
(or `sglang_nightjar.Engine`) hands its validated configuration to every child in one
environment variable, and its presence is what "asked for" means. A stock
`python -m sglang.launch_server` never has it.
"""

import logging

from sglang_nightjar.config import inherited_config

# It warns of each model file that needs a GPU library; naming such a model is an error of its own.
_MODEL_REGISTRY_LOG = "sglang.srt.models.registry"


def load() -> None:
    """Entry point `sglang.srt.plugins`: install the hooks.

    SGLang logs and swallows what a plugin raises, so a failure here must end the
    process itself: serving half-patched would be worse than not serving.
    """
    config = inherited_config()
    if config is None:
        return
    from sglang_nightjar.patches import install_or_exit

    install_or_exit(config)
    if config.resolved_platform() == "cpu":
        logging.getLogger(_MODEL_REGISTRY_LOG).setLevel(logging.ERROR)


def platform() -> str | None:
    """Entry point `sglang.srt.platforms`: ours where our worker serves, or None for SGLang's own choice."""
    config = inherited_config()
    if config is None or not config.own_worker():
        return None
    if config.resolved_platform() == "cpu":
        return "sglang_nightjar.platform.cpu:NightjarCpuPlatform"
    return "sglang_nightjar.platform.cuda:NightjarCudaPlatform"

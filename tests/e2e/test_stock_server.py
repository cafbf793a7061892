"""Installing this package changes nothing about a process that was not started for it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_nightjar.config import NightjarConfig

# Goes as far into a start as one can without a model: platform, plugins, hooks, command line.
PROGRAM = """
import importlib.metadata, json, os, signal, sys, warnings
if "hide" in sys.argv:
    seen = importlib.metadata.entry_points
    def others(**by):
        return [entry for entry in seen(**by) if entry.name != "nightjar"] if "group" in by else seen(**by)
    importlib.metadata.entry_points = others
before = dict(os.environ)
import sglang.launch_server
from sglang.srt.plugins import load_plugins
load_plugins()
import argparse
from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.platforms import current_platform
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
patched = [
    f"{name}.{attribute}"
    for name, module in sorted(sys.modules.items()) if name.startswith("sglang.") and module is not None
    for attribute, value in sorted(vars(module).items())
    if getattr(value, "__module__", None) and str(value.__module__).startswith("sglang_nightjar")
]
print(json.dumps({
    "platform": type(current_platform).__module__ + "." + type(current_platform).__name__,
    "hooks": sorted(t for t, hooks in HookRegistry._hooks.items() for h in hooks if h[2].plugin_name == "nightjar"),
    "patched": patched,
    "choices": {n: sorted(map(str, v)) for n, v in vars(choices).items() if isinstance(v, list)},
    "backends": sorted(ATTENTION_BACKENDS),
    "quantization": sorted(QUANTIZATION_METHODS),
    "options": [[a.option_strings, sorted(map(str, a.choices or [])), str(a.default)] for a in parser._actions],
    "environment": sorted(set(os.environ.items()) ^ set(before.items())),
    "filters": sorted(str(f) for f in warnings.filters),
    "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
    "ours": sorted(m for m in sys.modules if m.startswith("sglang_nightjar")),
}))
"""
OPTIONS = {"NIGHTJAR_POLICY": "static:3", "NIGHTJAR_PLATFORM": "cpu", "NIGHTJAR_MAX_GAMMA": "4"}
HANDOFF = {"SGLANG_NIGHTJAR_HANDOFF": '{"platform": "cpu"}'}


def observe(*arguments: str, **environ: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *arguments]
    clean = {name: value for name, value in os.environ.items() if "NIGHTJAR" not in name}
    done = subprocess.run(command, env={**clean, **environ}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    state: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return state


@pytest.fixture(scope="module")
def states() -> Iterator[dict[str, dict[str, Any]]]:
    """What four processes look like: without the package, with it, with its options set, and asked for."""
    with ThreadPoolExecutor(2) as pool:
        running = {
            "hidden": pool.submit(observe, "hide"),
            "installed": pool.submit(observe),
            "options": pool.submit(observe, **OPTIONS),
            "asked for": pool.submit(observe, **HANDOFF),
        }
        yield {name: future.result() for name, future in running.items()}


@pytest.mark.parametrize("variant", ["installed", "options"])
def test_a_stock_process_is_what_it_would_be_without_the_package(
    variant: str, states: dict[str, dict[str, Any]]
) -> None:
    hidden, stock = states["hidden"], states[variant]
    assert hidden["ours"] == []
    assert hidden["hooks"] == hidden["patched"] == []
    assert {**stock, "ours": []} == hidden


@pytest.mark.parametrize("variant", ["installed", "options"])
def test_only_the_entry_points_are_imported(variant: str, states: dict[str, dict[str, Any]]) -> None:
    """They, and what reads the variable by which a server hands them its configuration."""
    assert set(states[variant]["ours"]) <= {
        "sglang_nightjar",
        "sglang_nightjar.config",
        "sglang_nightjar.errors",
        "sglang_nightjar.plugin",
        "sglang_nightjar.policy",
        "sglang_nightjar.policy.base",
        "sglang_nightjar.policy.registry",
    }


def test_the_comparison_sees_a_nightjar_process(states: dict[str, dict[str, Any]]) -> None:
    hidden, ours = states["hidden"], states["asked for"]
    assert ours["platform"] == "sglang_nightjar.platform.cpu.NightjarCpuPlatform"
    assert "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func" in ours["hooks"]
    assert set(ours["backends"]) - set(hidden["backends"]) == {"nightjar_cpu"}
    assert set(ours["quantization"]) - set(hidden["quantization"]) == {f"nightjar_w{bits}" for bits in range(3, 9)}
    assert ours["options"] != hidden["options"]
    assert ours["patched"]


def test_the_entry_points_return_at_once() -> None:
    """Without torch, without SGLang, whatever the options say."""
    program = (
        "import sys; from sglang_nightjar import plugin; "
        "assert plugin.load() is None and plugin.platform() is None; "
        "assert not {'torch', 'sglang', 'numba', 'transformers'} & set(sys.modules)"
    )
    clean = {name: value for name, value in os.environ.items() if "NIGHTJAR" not in name}
    subprocess.run([sys.executable, "-c", program], env={**clean, **OPTIONS}, check=True, timeout=60)


def test_the_platform_is_offered_only_where_asked_for() -> None:
    program = "from sglang_nightjar import plugin; print(plugin.platform())"
    for platform, expected in (("cpu", "sglang_nightjar.platform.cpu:NightjarCpuPlatform"), ("cuda", "None")):
        handed = json.dumps({"platform": platform})
        environ = {**os.environ, "SGLANG_NIGHTJAR_HANDOFF": handed}
        done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
        assert NightjarConfig(platform=platform).resolved_platform() == platform

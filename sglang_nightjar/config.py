"""`NightjarConfig`: every option of ours, from four sources, validated once.

Precedence: command line (or `Engine` keywords), then `NIGHTJAR_*` environment, then the
JSON file named by `--nightjar-config` (or `NIGHTJAR_CONFIG`), then the defaults below. The
result is frozen and handed to SGLang's child processes in the `_HANDOFF` variable.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from sglang_nightjar.errors import UserError
from sglang_nightjar.policy.registry import DEFAULT_POLICY, KNOWN_POLICIES, PolicySpec, parse_policy

_HANDOFF = "SGLANG_NIGHTJAR_HANDOFF"
_ENV_PREFIX = "NIGHTJAR_"
_FILE = "config"  # names the JSON file; an option of every source but the file itself
_NOT_OPTIONS = ("NIGHTJAR_CACHE",)  # read elsewhere: where converted models are kept
_PLATFORMS = ("auto", "cpu", "cuda")
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")  # one of them wherever CUDA works
_CHOICES = ("auto", "on", "off")
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class NightjarConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of Nightjar itself; SGLang's own flags stay SGLang's.

    Attributes:
        policy: who chooses gamma (`policy/registry.py` has the names). Empty: `static:N` where
            SGLang's `--speculative-num-steps N` is given, else `nightjar`.
        max_gamma: largest gamma any policy may choose (tokens drafted per step).
        seed: of the policies that explore at random.
        tpot_slo_ms: time per output token of a request that users accept, ms; 0 for no limit.
        catchup_budget_ms: longest that catching up after a pause of speculation may stall one step, ms.
        journal: file to which every decision and outcome is written, one JSON object per line; empty: none.
        elastic: whether the draft's memory becomes KV cache while speculation is off and slots are short. `auto`:
            where this server can do it and the policy can judge what it brings; `on`: also only by hand,
            and an error where this server cannot; `off`: never.
        overlap: whether a step is scheduled while the one before computes, and its outcome processed a step late
            (SGLang's overlap scheduler). `auto`: what SGLang's `--disable-overlap-schedule` says, and not on a CPU,
            where scheduler and models share the cores; `on`, `off`.
        device_memory: of models and KV cache on the CPU platform, such as `2GiB`; empty: `--mem-fraction-static`
            or `--max-total-tokens` say.
        free_threshold: share of free KV slots below which memory is short.
        persist_steps: decode steps for which a reason to move the draft must last.
        cooldown_s: least time between two evictions, s.
        reload_chunk_mb: most megabytes of draft weights copied between two decode steps.
        draft_bits: weight bits of the demo draft, the target's quantized twin: 3 to 8.
        platform: `auto` takes the GPU where there is one, else the portable CPU
            platform; `cpu` and `cuda` insist.
        threads: CPU threads of one rank's kernels; 0 divides the cores among the ranks.
        emulate: set-up of models and device to emulate (`simulate/setups.py` has the names), or a file of a real
            server's measured steps (`simulate/measured.py`); empty: none.
        emulate_speed: emulated seconds per second.
        emulate_acceptance: how often the emulated draft agrees: a mean from 0 to 1, or a JSON file
            (`simulate/acceptance.py`: `AcceptanceSpec`); empty: that spec's defaults.
    """

    policy: str = ""
    max_gamma: int = 5
    seed: int = 0
    tpot_slo_ms: float = 0.0
    catchup_budget_ms: float = 200.0
    journal: str = ""
    elastic: str = "auto"
    overlap: str = "auto"
    device_memory: str = ""
    free_threshold: float = 0.10
    persist_steps: int = 32
    cooldown_s: float = 30.0
    reload_chunk_mb: int = 16
    draft_bits: int = 8
    platform: str = "auto"
    threads: int = 0
    emulate: str = ""
    emulate_speed: float = 1.0
    emulate_acceptance: str = ""

    def __post_init__(self) -> None:
        _check_range("max_gamma", self.max_gamma, 1, 16)
        _check_range("seed", self.seed, 0, (1 << 63) - 1)
        _check_range("tpot_slo_ms", self.tpot_slo_ms, 0, 3.6e6)
        _check_range("catchup_budget_ms", self.catchup_budget_ms, 1, 3.6e6)
        _check_range("free_threshold", self.free_threshold, 0.001, 0.5)
        _check_range("persist_steps", self.persist_steps, 1, 1_000_000)
        _check_range("cooldown_s", self.cooldown_s, 0, 86_400)
        _check_range("reload_chunk_mb", self.reload_chunk_mb, 1, 1 << 20)
        _check_range("draft_bits", self.draft_bits, 3, 8)
        _check_range("threads", self.threads, 0, 1024)
        _check_range("emulate_speed", self.emulate_speed, 0.001, 1000)
        if self.platform not in _PLATFORMS:
            raise UserError(f"--nightjar-platform {self.platform!r} is unknown; use one of: {', '.join(_PLATFORMS)}")
        for name, value in (("elastic", self.elastic), ("overlap", self.overlap)):
            if value not in _CHOICES:
                raise UserError(f"{_flag(name)} {value!r} is unknown; use one of: {', '.join(_CHOICES)}")
        self.device_bytes()
        if self.policy:
            self.policy_spec()

    def device_bytes(self) -> int | None:
        """`device_memory` in bytes, None where it is left open; `UserError` where it cannot be read."""
        if not self.device_memory:
            return None
        number = self.device_memory.rstrip("KMGiB")
        unit = self.device_memory[len(number) :]
        try:
            size = int(float(number) * _UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            size = 0
        if size <= 0:
            raise UserError(f"--nightjar-device-memory {self.device_memory!r} is not a size; write bytes, or 2GiB")
        return size

    def policy_spec(self) -> PolicySpec:
        """The parsed policy; raises `UserError` where it is unknown or its gamma exceeds `max_gamma`."""
        return parse_policy(self.policy or DEFAULT_POLICY, max_gamma=self.max_gamma)

    def wants_elastic(self) -> bool:
        """Whether the draft may leave the device: `auto` needs a policy that can judge what that brings."""
        return self.elastic == "on" or (self.elastic == "auto" and self.policy_spec().estimates)

    def own_worker(self) -> bool:
        """Whether our speculative worker serves a draft, and not SGLang's own.

        On a CPU always. On a GPU, where the project has never run it, only where what was asked for needs it: a policy
        that chooses gamma, or elastic memory.
        """
        if self.resolved_platform() == "cpu":
            return True
        return self.elastic == "on" or (bool(self.policy) and not self.policy_spec().fixed)

    @property
    def journal_path(self) -> Path:
        return Path(self.journal)

    def resolved_platform(self) -> str:
        """`cpu` or `cuda`: what `auto` means on this machine."""
        if self.platform != "auto":
            return self.platform
        if not any(Path(device).exists() for device in _GPU_DEVICES):
            return "cpu"  # and torch is not imported yet: it reads its threads' environment when it is
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UserError(f"{_flag(name)} is {value:g}; choose a value from {low:g} to {high:g}")


_HELP = {
    "policy": "who chooses gamma: " + ", ".join(KNOWN_POLICIES) + " (default: nightjar, or static:N where "
    "--speculative-num-steps N is given)",
    "max_gamma": "largest gamma any policy may choose (default: 5)",
    "seed": "of the policies that explore at random (default: 0)",
    "tpot_slo_ms": "time per output token of a request that users accept, ms; 0: no limit (default: 0)",
    "catchup_budget_ms": "longest that catching up after a pause of speculation may stall a step, ms (default: 200)",
    "journal": "file for every decision and outcome, one JSON object per line (default: none)",
    "elastic": "auto, on or off: whether the draft's memory becomes KV cache while speculation is off (default: auto)",
    "overlap": "auto, on or off: SGLang's overlap scheduling (default: auto, which is off on a CPU)",
    "device_memory": "memory of models and KV cache on a CPU, such as 2GiB (default: what SGLang's own flags say)",
    "free_threshold": "share of free KV slots below which memory is short (default: 0.1)",
    "persist_steps": "decode steps for which a reason to move the draft must last (default: 32)",
    "cooldown_s": "least time between two evictions of the draft, s (default: 30)",
    "reload_chunk_mb": "most megabytes of draft weights copied between two decode steps (default: 16)",
    "draft_bits": "weight bits of the demo draft, 3 to 8 (default: 8)",
    "platform": "auto, cpu or cuda (default: auto)",
    "threads": "CPU threads per rank; 0 divides the cores among the ranks (default: 0)",
    "emulate": "serve a set-up on an emulated device, such as 4090-r1-qwen-7b, or FILE.json (default: none)",
    "emulate_speed": "emulated seconds per second (default: 1)",
    "emulate_acceptance": "how often the emulated draft agrees: a mean from 0 to 1, or a JSON file (default: 0.7)",
}


class _Parser(argparse.ArgumentParser):
    """Reports a malformed command line as a `UserError` instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds every `--nightjar-*` flag to `parser`; unset flags stay None."""
    group = parser.add_argument_group("Nightjar")
    group.add_argument("--nightjar-config", metavar="FILE", help="JSON file with any of the options below")
    for field in msgspec.structs.fields(NightjarConfig):
        group.add_argument(_flag(field.name), default=None, metavar=field.name.upper(), help=_HELP[field.name])


def load_config(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[NightjarConfig, list[str]]:
    """Reads all four sources.

    Args:
        argv: command-line words, ours and SGLang's mixed.
        environ: environment to read; `os.environ` when None.
    Returns:
        The configuration, and the words that were not ours, in order.
    Raises:
        UserError: an option is unknown, malformed or out of range; the message names it.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_arguments(parser)
    parsed, rest = parser.parse_known_args(list(argv))
    unknown = next((word for word in rest if word.startswith("--nightjar-")), None)
    if unknown is not None:
        raise UserError(f"unknown option {unknown}; --help lists the --nightjar-* options")
    given = {name.removeprefix("nightjar_"): value for name, value in vars(parsed).items() if value is not None}
    return _merge(given, environ), rest


def make_config(options: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> NightjarConfig:
    """The same for keyword options: `options` stand where the command line does, names without a prefix."""
    return _merge(options, environ)


def _merge(given: Mapping[str, Any], environ: Mapping[str, str] | None) -> NightjarConfig:
    from_environment = _read_environment(os.environ if environ is None else environ)
    values = {**from_environment, **given}
    file_name = values.pop(_FILE, None)
    if file_name is not None:
        values = {**_read_file(Path(file_name)), **values}
    return _convert(values)


def _convert(values: Mapping[str, Any]) -> NightjarConfig:
    known = {field.name: field for field in msgspec.structs.fields(NightjarConfig)}
    for name, value in values.items():
        if name not in known:
            raise UserError(f"unknown Nightjar option {name!r}; known: {', '.join(known)}")
        try:
            msgspec.convert(value, known[name].type, strict=False)
        except msgspec.ValidationError:
            remedy = {int: "give a whole number", float: "give a number"}.get(known[name].type, "give a text")
            raise UserError(f"{_flag(name)} {value!r} is not valid: {remedy}") from None
    return msgspec.convert(dict(values), NightjarConfig, strict=False)


def _flag(name: str) -> str:
    return "--nightjar-" + name.replace("_", "-")


def _read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The `NIGHTJAR_*` options that are set; an empty variable counts as unset."""
    known = (_FILE, *(field.name for field in msgspec.structs.fields(NightjarConfig)))
    variables = {_ENV_PREFIX + name.upper(): name for name in known}
    for name in environ:
        if name.startswith(_ENV_PREFIX) and name not in variables and name not in _NOT_OPTIONS:
            raise UserError(
                f"the environment variable {name} is no option of Nightjar's; unset it or use one of: "
                f"{', '.join((*variables, *_NOT_OPTIONS))}"
            )
    return {option: environ[name] for name, option in variables.items() if environ.get(name)}


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read --nightjar-config {path}: {error.strerror}; give a JSON file") from None
    except ValueError as error:
        raise UserError(f"--nightjar-config {path} is not valid JSON: {error}; correct the file") from None
    if not isinstance(content, dict):
        raise UserError(f"--nightjar-config {path} must hold one JSON object, not a {type(content).__name__}")
    return content


def hand_to_children(config: NightjarConfig) -> None:
    """Makes `config` the one of this process and of every process it starts from now on."""
    os.environ[_HANDOFF] = msgspec.json.encode(config).decode()


def inherited_config() -> NightjarConfig | None:
    """The configuration of the Nightjar server this process belongs to, or None in any other process."""
    text = os.environ.get(_HANDOFF)
    return None if text is None else msgspec.json.decode(text, type=NightjarConfig)

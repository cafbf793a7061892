"""From a benchmark's own JSON to what is kept of it: its form, where it was made, no more than the tables need.

Paths of the machine it ran on are cut to file names. Raw data of single requests and runs is left out.
"""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evidence.sources import MACHINE, Source
from evidence.suites import kept_paper, kept_regret, kept_scenario
from sglang_nightjar.errors import UserError

_POINTS = 200  # of a server's timeline
_DIGITS = 6
_DESTINATIONS = ("json", "plot", "journals", "keep")
_PATH = re.compile(r"(?<![\w./:-])/(?:[^\s/'\"]+/)+([^\s/'\"]+)")


def publish(path: Path) -> Source:
    """What is kept of the file a benchmark wrote with `--json`.

    Raises:
        UserError: it is no benchmark's, or neither it nor `NAME.about.json` beside it says where it was made.
    """
    raw = _read(path)
    form = form_of(raw)
    if form is None:
        raise UserError(f"{path} is not the JSON of a benchmark that bench/report.py knows")
    about = _about(raw, form, path)
    trim: Callable[[dict[str, Any]], dict[str, Any]] = _TRIMS.get(form, _plain)
    try:
        data = trim(raw)
    except (UserError, KeyError, TypeError, ValueError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{path}, taken for a {form} file: {why}") from None
    return Source(path.stem, form, level_of(raw, form, about), _clean(about), _clean(data))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None


def form_of(raw: Any) -> str | None:
    """Whose JSON this is; None: nobody's."""
    if not isinstance(raw, dict):
        return None
    for form, keys in _KEYS:
        if all(key in raw for key in keys):
            if form == "serving" and raw["samples"] and "L2" in raw["samples"][0]:
                return "calibrate"
            return form
    return None


# Keys of each form's JSON; the first that has all of its own is taken.
_KEYS = (
    ("regret", ("summary", "stationary")),
    ("paper", ("closed", "poisson", "dynamic")),
    ("scenario", ("scenario", "results")),
    ("deciding", ("policies", "steps")),
    ("kernels", ("kernels",)),
    ("gpu", ("rows", "failed")),
    ("lossless", ("rows", "options")),
    ("tax", ("rows",)),
    ("serving", ("samples",)),
    ("overhead", ("servers", "set_ups")),
    ("platform", ("linear",)),
    ("platform", ("servers",)),
)


def level_of(raw: dict[str, Any], form: str, about: dict[str, Any]) -> str:
    """The evidence level."""
    if "level" in raw:
        return str(raw["level"])
    if form == "calibrate":
        return "L1 to L3" if raw["options"].get("real") else "L1 and L2"
    if "gpu" in about:
        return "L4"
    options = raw.get("options", {})
    words = [str(word) for word in options.get("server_arguments", ())]
    emulated = bool(options.get("set_up") or options.get("emulate"))
    return "L2" if emulated or any(word.startswith("--nightjar-emulate") for word in words) else "L3"


def _about(raw: dict[str, Any], form: str, path: Path) -> dict[str, Any]:
    """Where it was made. Files of versions that did not say need another file that does."""
    about = dict(raw.get("machine", {}))
    beside = path.with_suffix(".about.json")
    if beside.exists():
        about |= _read(beside)
    if "command" not in about and form in ("serving", "calibrate"):
        about["command"] = spelled_out(f"bench/{form}.py", raw["options"])
    missing = [key for key in MACHINE if key not in about]
    if missing:
        raise UserError(
            f"{path} does not say its {', '.join(missing)}: give them in {beside.name} beside it "
            "(scripts/python bench/machine.py prints such a file)"
        )
    return about


def spelled_out(script: str, options: dict[str, Any]) -> str:
    """A command line with every option of a run, for files that kept the options and not the command."""
    words = ["scripts/python", script]
    told = ("set_up", "speed") if "emulate" in options else ()  # what it was, not what was asked
    for name, value in options.items():
        if value is None or value is False or value in ("", []) or name in (*_DESTINATIONS, *told):
            continue
        if value is True:
            value = []
        flag = "--" + name.replace("_", "-")
        if name == "server_arguments":
            words.append(f"{flag}={shlex.join(map(str, value))}")
        else:
            words += [flag, *map(str, value)] if isinstance(value, list) else [flag, str(value)]
    return shlex.join(words)


def _serving(raw: dict[str, Any]) -> dict[str, Any]:
    if "servers" not in raw:
        raise UserError("it has no 'servers': that run of bench/serving.py has not ended")
    servers = {}
    for policy, known in raw["servers"].items():
        timeline = known["timeline"]
        if isinstance(timeline, list):  # a point per decision; later versions have a column per figure, in 500 spans
            timeline = timeline[:: -(-len(timeline) // _POINTS) or 1]
        servers[policy] = known | {"timeline": timeline}
    return _plain(raw) | {"samples": _answers(raw["samples"]), "servers": servers}


def _answers(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checksums of answers as small numbers, equal where they are: 0 for the text of the first policy."""
    kept: list[dict[str, Any]] = []
    seen: dict[tuple[str, int, int], list[int]] = {}
    for sample in samples:
        numbers = []
        for index, checksum in enumerate(sample.get("answers", ())):
            texts = seen.setdefault((sample["load"], sample["repeat"], index), [])
            if checksum not in texts:
                texts.append(checksum)
            numbers.append(texts.index(checksum))
        kept.append(sample | {"answers": numbers} if numbers else sample)
    return kept


def _plain(raw: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in raw.items() if key not in ("machine", "level")}
    if "options" in kept:
        kept["options"] = {key: value for key, value in raw["options"].items() if key not in _DESTINATIONS}
    return kept


_TRIMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "serving": _serving,
    "paper": kept_paper,
    "regret": kept_regret,
    "scenario": kept_scenario,
}


def _clean(value: Any) -> Any:
    """Numbers of `_DIGITS` digits, no NaN, no folders of the machine."""
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    if isinstance(value, float):
        return None if value != value else float(f"{value:.{_DIGITS}g}")
    return _PATH.sub(r"\1", value) if isinstance(value, str) else value

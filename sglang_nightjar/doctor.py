"""`python -m sglang_nightjar.doctor [--json]`: what this machine can do, and what is wrong.

Starts nothing and changes nothing. The exit status is 0 if a server can run, else 1.
"""

import argparse
import importlib
import importlib.metadata
import os
import platform as machine
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sglang_nightjar import __version__
from sglang_nightjar.config import NightjarConfig, make_config
from sglang_nightjar.demo.cache import cache_root, is_complete
from sglang_nightjar.demo.smollm2 import NEEDED_BYTES, find_gguf, model_folder
from sglang_nightjar.errors import UserError
from sglang_nightjar.patches.contract_check import check_contract
from sglang_nightjar.platform.threads import thread_share
from sglang_nightjar.serving.memory import available_memory
from sglang_nightjar.serving.startup import PLATFORM_VARIABLES

_GIB = 2**30
_DEMO_MEMORY = 5 * _GIB  # SGLang's three processes, both models, and some KV slots (measured: 7.3 GB with all)
_PYTHONS = ((3, 10), (3, 11), (3, 12))
_INSTRUCTIONS = ("avx2", "fma", "avx512f", "amx_tile", "asimd")
_NUMBA_LAYERS = {"tbb": "tbbpool", "omp": "omppool", "workqueue": "workqueue"}  # numba prefers the first
_ENTRY_POINTS = ("sglang.srt.plugins", "sglang.srt.platforms")


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong and what to do about it; with an `error`, no server can run."""

    level: str
    message: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `diagnose` found out; None where it could not.

    Attributes:
        platform: `cpu` or `cuda`, the one that would serve.
        cores: those this process may use.
        instructions: vector instruction sets of the CPU, named as in /proc/cpuinfo.
        memory_available: bytes.
        contract: how many names of SGLang were compared, where all of them agree.
        threads: CPU threads of the one rank of a server.
        numba_layers: numba's threading layers that load here, the preferred one first.
        demo_model: folder of the converted demo model; None before its first use.
    """

    nightjar: str
    python: str
    sglang: str | None
    torch: str | None
    numba: str | None
    contract: int | None
    platform: str | None
    device: str
    cores: int
    instructions: list[str]
    memory_available: int
    threads: int
    numba_layers: list[str]
    demo_model: str | None
    findings: list[Finding]

    @property
    def can_serve(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)


def diagnose(environ: Mapping[str, str] | None = None) -> Report:
    """Looks at this machine and this installation; a few seconds, most of them for importing torch."""
    environ = os.environ if environ is None else environ
    config, findings = check_options(environ)
    contract, drift = check_sglang()
    chosen, device, no_device = check_platform(config)
    demo, no_demo = check_demo(cache_root())
    cpu = read_cpuinfo()
    memory, cores, layers = available_memory(), sorted(os.sched_getaffinity(0)), numba_layers()
    findings += check_python(sys.version_info[:2]) + drift + check_entry_points(environ) + no_device + no_demo
    if chosen == "cpu":
        findings += check_cpu(len(cores), memory, cpu, layers)
    return Report(
        nightjar=__version__,
        python=machine.python_version(),
        sglang=installed("sglang"),
        torch=installed("torch"),
        numba=installed("numba"),
        contract=contract,
        platform=chosen,
        device=device or cpu["name"],
        cores=len(cores),
        instructions=cpu["instructions"].split(),
        memory_available=memory,
        threads=thread_share(config, ranks=1),
        numba_layers=layers,
        demo_model=None if demo is None else str(demo),
        findings=findings,
    )


def installed(distribution: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_cpuinfo(file: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """`name` of the CPU and its vector `instructions`, separated by spaces."""
    fields: dict[str, str] = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    flags = fields.get("flags", fields.get("features", "")).split()
    present = [name for name in _INSTRUCTIONS if name in flags]
    return {"name": fields.get("model name", machine.machine()), "instructions": " ".join(present)}


def numba_layers() -> list[str]:
    """numba's threading layers whose libraries load on this machine."""
    found = []
    for layer, module in _NUMBA_LAYERS.items():
        try:
            importlib.import_module(f"numba.np.ufunc.{module}")
        except ImportError:
            continue
        found.append(layer)
    return found


def check_options(environ: Mapping[str, str]) -> tuple[NightjarConfig, list[Finding]]:
    """What the `NIGHTJAR_*` variables say."""
    try:
        return make_config({}, environ), []
    except UserError as error:
        return NightjarConfig(), [Finding("error", str(error))]


def check_python(version: tuple[int, ...]) -> list[Finding]:
    if version in _PYTHONS:
        return []
    known = ", ".join(".".join(map(str, one)) for one in _PYTHONS)
    return [Finding("error", f"Python {'.'.join(map(str, version))} is not supported; use one of {known}")]


def check_sglang() -> tuple[int | None, list[Finding]]:
    """Whether the installed SGLang is the one this code was written for."""
    try:
        return check_contract(), []
    except UserError as error:
        return None, [Finding("error", str(error))]


def check_entry_points(environ: Mapping[str, str]) -> list[Finding]:
    """Whether SGLang will find this package's plugins."""
    findings = []
    for group in _ENTRY_POINTS:
        if not any(entry.name == "nightjar" for entry in importlib.metadata.entry_points(group=group)):
            message = f"SGLang does not find this package (entry point {group}); run: pip install -e ."
            findings.append(Finding("error", message))
    for name in PLATFORM_VARIABLES:
        if environ.get(name) and "nightjar" not in environ[name].split(","):
            message = f"{name}={environ[name]} keeps this package out of SGLang; unset it, or add nightjar to it"
            findings.append(Finding("error", message))
    return findings


def check_platform(config: NightjarConfig) -> tuple[str | None, str, list[Finding]]:
    """The platform that would serve, the name of its device (empty for a CPU), and what is wrong with it."""
    try:
        import torch
    except ImportError as error:
        return None, "", [Finding("error", f"torch cannot be imported ({error}); run: pip install -e .")]
    if config.resolved_platform() == "cpu":
        return "cpu", "", []
    if not torch.cuda.is_available():
        return "cuda", "none", [Finding("error", "NIGHTJAR_PLATFORM=cuda, and torch finds no CUDA device; unset it")]
    untested = (
        "on a GPU SGLang's own worker serves unless more is asked for, and ours has never run on one (docs/gpu.md)"
    )
    return "cuda", torch.cuda.get_device_name(), [Finding("warning", untested)]


def check_demo(cache: Path) -> tuple[Path | None, list[Finding]]:
    """The converted demo model, or whether it can be made when it is first served."""
    folder = model_folder(cache)
    if is_complete(folder):
        return folder, []
    try:
        find_gguf()
    except UserError as error:
        return None, [Finding("warning", str(error))]
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < NEEDED_BYTES:
        message = f"{cache} has {free / 1e9:.1f} GB free and the demo model needs {NEEDED_BYTES / 1e9} GB; make room"
        return None, [Finding("warning", message)]
    return None, []


def check_cpu(cores: int, memory: int, cpu: Mapping[str, str], layers: Sequence[str]) -> list[Finding]:
    """What will be slow, or will not fit, on this CPU."""
    findings = []
    if cores < 2:
        findings.append(Finding("warning", "only one core: scheduler and model take turns; give it two or more"))
    if memory < _DEMO_MEMORY:
        message = f"{memory / _GIB:.1f} GiB of memory are free and the demo pair takes {_DEMO_MEMORY // _GIB}"
        findings.append(Finding("warning", f"{message}; end other programs, or serve a smaller model"))
    if not {"avx2", "asimd"} & set(cpu["instructions"].split()):
        findings.append(Finding("warning", "the CPU has neither AVX2 nor NEON: kernels run, slowly; use a newer one"))
    if not layers:
        findings.append(Finding("error", "no threading layer of numba loads; run: pip install --force-reinstall numba"))
    elif layers == ["workqueue"]:
        message = "numba has neither OpenMP nor TBB here and its own threads fight torch's; install libgomp"
        findings.append(Finding("warning", message))
    return findings


def as_text(report: Report) -> str:
    """The report for a person: facts first, then one line per finding."""
    contract = "contract broken" if report.contract is None else f"contract holds ({report.contract} names)"
    facts = {
        "platform": report.platform or "none",
        "device": f"{report.device}, {report.cores} cores {' '.join(report.instructions)}".rstrip(),
        "memory": f"{report.memory_available / _GIB:.1f} GiB available",
        "sglang": f"{report.sglang or 'not installed'}, {contract}",
        "python": f"{report.python}, torch {report.torch}, numba {report.numba}",
        "threads": f"{report.threads} per rank; numba's layers: {', '.join(report.numba_layers) or 'none'}",
        "demo model": report.demo_model or "not converted yet; the first start without --model-path does it",
    }
    lines = [f"{name + ':':12}{value}" for name, value in facts.items()]
    lines += [f"{finding.level}: {finding.message}" for finding in report.findings]
    ready = "a server can run: python -m sglang_nightjar.launch_server"
    return "\n".join([*lines, ready if report.can_serve else "no server can run; see the errors above"])


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sglang_nightjar.doctor", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    options = parser.parse_args(argv)
    report = diagnose()
    if options.json:
        print(msgspec.json.encode({"can_serve": report.can_serve, **msgspec.structs.asdict(report)}).decode())
    else:
        print(as_text(report))
    return 0 if report.can_serve else 1


if __name__ == "__main__":
    sys.exit(main())

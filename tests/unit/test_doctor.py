"""The doctor: each check on its own, and the command as a person or a script runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_nightjar import doctor
from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.demo import smollm2
from sglang_nightjar.errors import UserError
from sglang_nightjar.patches.contract_check import ContractError

GIB = 2**30
GOOD_CPU = {"name": "some CPU", "instructions": "avx2 fma"}


def messages(findings: list[doctor.Finding], level: str) -> list[str]:
    assert {finding.level for finding in findings} <= {"error", "warning"}
    assert all("\n" not in finding.message for finding in findings)
    return [finding.message for finding in findings if finding.level == level]


def test_python_versions() -> None:
    assert doctor.check_python((3, 11)) == []
    (message,) = messages(doctor.check_python((3, 13)), "error")
    assert message == "Python 3.13 is not supported; use one of 3.10, 3.11, 3.12"


def test_options() -> None:
    assert doctor.check_options({"NIGHTJAR_THREADS": "3"}) == (NightjarConfig(threads=3), [])
    config, findings = doctor.check_options({"NIGHTJAR_THREADS": "many"})
    assert config == NightjarConfig()
    assert "--nightjar-threads 'many'" in messages(findings, "error")[0]


def test_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    names, findings = doctor.check_sglang()
    assert names is not None
    assert names > 80
    assert findings == []

    def drifted() -> int:
        raise ContractError("sglang.srt.x is gone. Install the pinned version")

    monkeypatch.setattr(doctor, "check_contract", drifted)
    names, findings = doctor.check_sglang()
    assert names is None
    assert messages(findings, "error") == ["sglang.srt.x is gone. Install the pinned version"]


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_entry_points({}) == []
    assert doctor.check_entry_points({"SGLANG_PLUGINS": "other,nightjar"}) == []
    (message,) = messages(doctor.check_entry_points({"SGLANG_PLUGINS": "other"}), "error")
    assert message.startswith("SGLANG_PLUGINS=other keeps this package out of SGLang; unset it")
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda **_: [])
    found = messages(doctor.check_entry_points({}), "error")
    assert len(found) == 2
    assert all("run: pip install -e ." in message for message in found)


def test_platform() -> None:
    assert doctor.check_platform(NightjarConfig(platform="cpu")) == ("cpu", "", [])


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    chosen, device, findings = doctor.check_platform(NightjarConfig(platform="cuda"))
    assert (chosen, device) == ("cuda", "none")
    assert "finds no CUDA device" in messages(findings, "error")[0]


def test_cpu() -> None:
    assert doctor.check_cpu(2, 16 * GIB, GOOD_CPU, ["omp", "workqueue"]) == []
    assert doctor.check_cpu(4, 16 * GIB, {"name": "arm", "instructions": "asimd"}, ["tbb"]) == []
    assert "only one core" in messages(doctor.check_cpu(1, 16 * GIB, GOOD_CPU, ["omp"]), "warning")[0]
    assert "GiB of memory are free" in messages(doctor.check_cpu(2, GIB, GOOD_CPU, ["omp"]), "warning")[0]
    old = {"name": "old CPU", "instructions": ""}
    assert "neither AVX2 nor NEON" in messages(doctor.check_cpu(2, 16 * GIB, old, ["omp"]), "warning")[0]
    assert "install libgomp" in messages(doctor.check_cpu(2, 16 * GIB, GOOD_CPU, ["workqueue"]), "warning")[0]
    assert "no threading layer" in messages(doctor.check_cpu(2, 16 * GIB, GOOD_CPU, []), "error")[0]


def test_cpuinfo(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: fpu avx avx2 fma sse\n\nprocessor\t: 1\n"
    )
    assert doctor.read_cpuinfo(file) == {"name": "Some CPU @ 2 GHz", "instructions": "avx2 fma"}
    file.write_text("processor : 0\nFeatures : fp asimd crc32\n")
    assert doctor.read_cpuinfo(file)["instructions"] == "asimd"
    assert doctor.read_cpuinfo(tmp_path / "none")["instructions"] == ""


def test_numba_layers_are_in_numbas_order() -> None:
    layers = doctor.numba_layers()
    assert layers
    assert layers == [name for name in ("tbb", "omp", "workqueue") if name in layers]


def test_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_gguf", lambda: tmp_path / "model.gguf")
    assert doctor.check_demo(tmp_path / "cache") == (None, [])  # not converted, but it can be
    folder = smollm2.model_folder(tmp_path / "cache")
    folder.mkdir(parents=True)
    (folder / "weights").write_text("12345")
    (folder / "nightjar-manifest.json").write_text('{"weights": 5}')
    assert doctor.check_demo(tmp_path / "cache") == (folder, [])
    (folder / "weights").write_text("1")
    assert doctor.check_demo(tmp_path / "cache")[0] is None


def test_demo_model_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "NEEDED_BYTES", 1e30)
    monkeypatch.setattr(doctor, "find_gguf", lambda: tmp_path / "model.gguf")
    assert "make room" in messages(doctor.check_demo(tmp_path)[1], "warning")[0]

    def missing() -> Path:
        raise UserError("the wheel is not installed")

    monkeypatch.setattr(doctor, "find_gguf", missing)
    assert messages(doctor.check_demo(tmp_path)[1], "warning") == ["the wheel is not installed"]


def test_the_report_is_facts_then_findings() -> None:
    report = doctor.diagnose({})
    text = doctor.as_text(report).splitlines()
    assert text[0] == f"platform:   {report.platform}"
    assert len(text) == 8 + len(report.findings)
    assert report.sglang == "0.5.23"
    assert report.cores == len(os.sched_getaffinity(0))
    broken = doctor.diagnose({"NIGHTJAR_POLCY": "off", "SGLANG_PLATFORM": "other"})
    assert not broken.can_serve
    assert len(messages(broken.findings, "error")) == 2
    assert doctor.as_text(broken).endswith("no server can run; see the errors above")


def test_the_command() -> None:
    command = [sys.executable, "-m", "sglang_nightjar.doctor", "--json"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NIGHTJAR_", "SGLANG_"))}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120)
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["can_serve"] is True
    assert report["contract"] > 80
    assert set(report) == {"can_serve", *doctor.Report.__struct_fields__}


def test_the_exit_status_of_a_broken_installation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert doctor.main([]) == 1
    assert "error: SGLANG_PLUGINS=other" in capsys.readouterr().out
    monkeypatch.setenv("SGLANG_PLUGINS", "")
    assert doctor.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["can_serve"] is True

"""The contract is complete (every upstream name we import is in it), holds, and notices drift."""

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_nightjar.patches import contract_check as contract
from sglang_nightjar.patches import source_scan

ROOT = Path(__file__).parents[2]
SOURCES = [*ROOT.glob("sglang_nightjar/**/*.py"), *ROOT.glob("patches/*.py"), *ROOT.glob("kernels/*.py")]


def imported_upstream_names() -> set[tuple[str, str]]:
    names = set()
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
                module = (node.module or "").removeprefix("sglang").lstrip(".")
                names |= {(module, alias.name) for alias in node.names}
            if isinstance(node, ast.Import):
                assert not any(alias.name.split(".")[0] == "sglang" for alias in node.names), (
                    f"{file}: import names from SGLang, not the package, so that the contract can list them"
                )
    return names


def test_the_installed_sglang_keeps_the_contract() -> None:
    assert contract.check_contract() == len(contract.entries()) > 80


def test_every_upstream_import_is_listed() -> None:
    listed = {(entry.module, entry.name.split(".")[0]) for entry in contract.entries()}
    modules = {entry.module for entry in contract.entries()}
    missing = {
        (module, name)
        for module, name in imported_upstream_names()
        if (module, name) not in listed and f"{module}.{name}" not in modules
    }
    assert not missing, f"add to patches/contract.py: {sorted(missing)}"


def test_the_check_imports_nothing_of_sglang() -> None:
    program = (
        "import sys; from sglang_nightjar.patches.contract_check import check_contract; check_contract(); "
        "assert not [name for name in sys.modules if name.split('.')[0] in ('sglang', 'torch')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the installed package: one module, which a test then changes."""
    (tmp_path / "worker.py").write_text(
        "try:\n    from fast import helper\nexcept ImportError:\n    helper = None\n"
        "class Worker:\n    size: int\n    def __init__(self, path, *, port=0):\n        self.pool = path\n"
        "    def run(self, batch, flag=False):\n        pass\n"
        "def plan(lengths, page_size, **extra):\n    pass\n"
    )
    monkeypatch.setattr(contract, "package_root", lambda _: tmp_path)
    monkeypatch.setattr(
        contract,
        "entries",
        lambda: parsed(
            "worker\n    helper\n    Worker(path, port)\n    Worker{size, pool}\n"
            "    Worker.run(batch, flag)\n    plan(page_size, ...)\n"
        ),
    )
    source_scan.module_definitions.cache_clear()
    return tmp_path / "worker.py"


parsed = contract.entries


def test_no_drift_where_the_module_is_as_listed(upstream: Path) -> None:
    assert contract.check_contract() == 5


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("def run(self, batch, flag=False)", "def run(self, batch)", "sglang.worker.Worker.run takes (batch), not"),
        ("def run", "def execute", "sglang.worker.Worker.run is gone"),
        ("port=0", "host=''", "sglang.worker.Worker takes (path, host), not (path, port)"),
        ("self.pool", "self.arena", "sglang.worker.Worker has no pool"),
        ("    size: int\n", "", "sglang.worker.Worker has no size"),
        ("def plan(lengths, page_size", "def plan(lengths, page", "sglang.worker.plan has no parameter page_size"),
        ("def plan", "def plot", "sglang.worker.plan is gone"),
    ],
)
def test_drift_is_named(upstream: Path, old: str, new: str, complaint: str) -> None:
    upstream.write_text(upstream.read_text().replace(old, new))
    with pytest.raises(contract.ContractError) as error:
        contract.check_contract()
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_module_is_named(upstream: Path) -> None:
    upstream.unlink()
    with pytest.raises(contract.ContractError, match=r"sglang\.worker is gone"):
        contract.check_contract()


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.6.0")
    with pytest.raises(contract.ContractError, match=r"this is sglang 0\.6\.0.*pip install sglang==0\.5\.23"):
        contract.check_contract()

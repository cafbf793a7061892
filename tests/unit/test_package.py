"""The shape of the package: what may import what, and what installing it brings."""

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def imports_of(file: Path) -> set[str]:
    """Top-level packages a file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("file", sorted(ROOT.glob("sglang_nightjar/policy/**/*.py")), ids=lambda file: file.name)
def test_policy_is_pure(file: Path) -> None:
    assert not imports_of(file) & {"torch", "sglang"}


def test_hooks_are_registered_in_patches_only() -> None:
    files = [file for file in ROOT.glob("sglang_nightjar/**/*.py") if "HookRegistry" in file.read_text()]
    assert files == []


def test_kernels_folder_does_not_shadow_the_package_transformers_imports() -> None:
    """`python -m` puts the checkout first on the path, and PyPI has a package called `kernels` too."""
    program = "import kernels, sglang_nightjar.kernels.draft_lens as ours; print(kernels.__file__, ours.__file__)"
    output = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    theirs, ours = output.stdout.split()
    assert "site-packages" in theirs
    assert Path(ours).resolve() == ROOT / "kernels" / "draft_lens.py"


def test_entry_points() -> None:
    for group in ("sglang.srt.plugins", "sglang.srt.platforms"):
        (entry,) = [entry for entry in importlib.metadata.entry_points(group=group) if entry.name == "nightjar"]
        assert callable(entry.load())


def test_importing_the_package_imports_neither_sglang_nor_torch() -> None:
    program = (
        "import sys, sglang_nightjar, sglang_nightjar.config, sglang_nightjar.policy.registry; "
        "assert not {'sglang', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_setup_and_the_scripts_pin_the_same_sglang() -> None:
    from sglang_nightjar.patches.contract import SGLANG_VERSION

    pin = f"sglang=={SGLANG_VERSION}"
    assert pin in (ROOT / "setup.py").read_text()
    assert pin in (ROOT / "scripts" / "requirements.txt").read_text().split()

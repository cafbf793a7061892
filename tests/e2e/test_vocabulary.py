"""Draft and target of one tokenizer and of differently padded vocabularies, and of two tokenizers.

The ids between the tokenizer's 128 and the padded 160 are made as dangerous as they can be:
the padded draft likes nothing better than to draft them, though the target has no such
tokens; and prompts to the padded target contain them, though the draft has none.
"""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from serving import serve_all, tail
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM
from workload import Request, histogram, random_tokens, run_all

TOKENS, PADDED = 128, 160
GAMMA = 3


class Pair:
    """A running server and the checkpoint of its target."""

    def __init__(self, server, target: Path) -> None:
        self.server, self.target = server, target


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    folder = tmp_path_factory.mktemp("vocabularies")
    padded = {"vocab_size": TOKENS, "padded_vocab_size": PADDED}
    target, draft = make_tiny_model(folder / "target"), make_tiny_model(folder / "draft", perturb=0.05)
    padded_target = make_tiny_model(folder / "padded-target", **padded)
    padded_draft = make_tiny_model(folder / "padded-draft", perturb=0.05, **padded)
    _prefer_padding(padded_draft)
    chosen = {"target-padded": (padded_target, draft), "draft-padded": (target, padded_draft)}
    command_lines = [
        ["--model-path", model, "--speculative-draft-model-path", other, "--nightjar-policy", f"static:{GAMMA}"]
        for model, other in chosen.values()
    ]
    with serve_all(command_lines) as servers:
        yield {name: Pair(server, model) for server, (name, (model, _)) in zip(servers, chosen.items(), strict=True)}


def _prefer_padding(folder: Path) -> None:
    """Makes the padding's logits the highest of all (channel 0 of a tiny model's last layer is constant)."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][TOKENS:, 0] = 100.0
    save_file(tensors, file, metadata={"format": "pt"})


def _greedy_choices(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> list[int]:
    """What transformers would choose at each position of `answer`, all from one forward without a KV cache."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("name", ["target-padded", "draft-padded"])
def test_padded_pair_is_lossless(pairs: dict[str, Pair], name: str) -> None:
    pair = pairs[name]
    model = AutoModelForCausalLM.from_pretrained(pair.target)
    rng = random.Random(5)
    common, any_ids = (
        [Request(random_tokens(rng, rng.randrange(1, 120), vocab_size), 24) for _ in range(12)]
        for vocab_size in (TOKENS, model.config.vocab_size)
    )
    answers = run_all(pair.server, common + any_ids)
    assert pair.server.alive(), tail(pair.server.log)
    for answer, request in zip(answers, common + any_ids, strict=True):
        assert answer["output_ids"] == _greedy_choices(model, request.prompt, answer["output_ids"])
    accepted = histogram(answers[: len(common)], GAMMA)
    assert np.dot(accepted, range(GAMMA + 1)) > sum(accepted), f"drafts are accepted no more: {accepted}"


def test_draft_of_another_tokenizer_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    other = make_tiny_model(tmp_path / "other", vocab_size=300)
    words = ["--model-path", tiny_target, "--speculative-draft-model-path", other, "--nightjar-policy", "static:3"]
    command = [sys.executable, "-m", "sglang_nightjar.launch_server", *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert result.returncode != 0
    message = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(message) == 1 and "vocabulary" in message[0] and str(other) in message[0], result.stderr[-2000:]
    assert "Traceback" not in result.stderr

"""The tiny random model: are its distributions fit for tests of sampling and speculation?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tiny_model import make_tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer


def _distributions(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.softmax(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, dim=-1)


@pytest.mark.parametrize("vocab_size", [64, 300])
def test_tiny_model_is_neither_flat_nor_peaked_and_sees_its_context(tmp_path: Path, vocab_size: int) -> None:
    ids = torch.randint(3, vocab_size, (64, 16), generator=torch.Generator().manual_seed(0))
    p = _distributions(make_tiny_model(tmp_path, vocab_size=vocab_size), ids)
    entropy = -(p * torch.log(p + 1e-30)).sum(-1).mean().item()
    assert 1.8 < entropy < 2.2, entropy
    assert 0.3 < p.max(-1).values.mean().item() < 0.5

    changed = ids.clone()
    changed[:, 0] = (ids[:, 0] - 2) % (vocab_size - 3) + 3
    assert (changed[:, 0] != ids[:, 0]).all()
    distance = (p - _distributions(tmp_path, changed)).abs().sum(-1)[:, -1].mean() / 2
    assert distance > 0.2, f"the first token moves the last distribution by {distance:.3f} only"


def test_perturbed_draft_agrees_in_part(tmp_path: Path) -> None:
    ids = torch.randint(3, 128, (32, 16), generator=torch.Generator().manual_seed(1))
    target = _distributions(make_tiny_model(tmp_path / "target"), ids)
    overlaps = []
    for perturb in (0.0, 0.05, 0.2, 1.0):
        draft = _distributions(make_tiny_model(tmp_path / f"{perturb}", perturb=perturb), ids)
        overlaps.append(torch.minimum(target, draft).sum(-1).mean().item())
    assert overlaps[0] == pytest.approx(1.0, abs=1e-6)
    assert overlaps[1] == pytest.approx(0.80, abs=0.05)
    assert overlaps[2] == pytest.approx(0.40, abs=0.05)
    assert overlaps[3] < 0.1


def test_padding_the_vocabulary_changes_no_distribution(tmp_path: Path) -> None:
    ids = torch.randint(3, 64, (8, 16), generator=torch.Generator().manual_seed(2))
    plain = _distributions(make_tiny_model(tmp_path / "plain", vocab_size=64), ids)
    padded = _distributions(make_tiny_model(tmp_path / "padded", vocab_size=64, padded_vocab_size=80), ids)
    assert padded.shape[-1] == 80 and len(AutoTokenizer.from_pretrained(tmp_path / "padded")) == 64
    assert torch.allclose(padded[..., :64], plain, atol=1e-6)
    assert padded[..., 64:].max() < 1e-12


def test_tiny_weights_follow_from_the_seed(tmp_path: Path) -> None:
    first, again, other = (
        load_file(make_tiny_model(tmp_path / name, seed=seed) / "model.safetensors")
        for name, seed in (("first", 5), ("again", 5), ("other", 6))
    )
    assert all(np.array_equal(first[name], again[name]) for name in first)
    matrices = [name for name in first if first[name].ndim == 2]
    for name in matrices:  # independent draws, not one scaled into the other
        correlation = np.corrcoef(first[name][1:, 1:].ravel(), other[name][1:, 1:].ravel())[0, 1]
        assert abs(correlation) < 0.1, f"{name}: {correlation}"


@pytest.mark.parametrize("vocab_size", [41, 64, 259, 300, 935])
def test_tiny_tokenizer(vocab_size: int) -> None:
    tokenizer = tiny_tokenizer(vocab_size)
    assert tokenizer.get_vocab_size() == vocab_size
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab_size))
    assert tokenizer.decode(tokenizer.encode("read 42 files\n").ids) == "read 42 files\n"
    reads_all = vocab_size >= 259
    ids = tokenizer.encode("Größe").ids
    assert (tokenizer.decode(ids) == "Größe") == reads_all and (0 in ids) != reads_all


def test_tiny_chat_template(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path))
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "system: be brief\nuser: hi\nassistant: "
    assert tokenizer.decode(tokenizer(rendered).input_ids) == rendered


def test_sglang_reads_it(tmp_path: Path) -> None:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    folder = str(make_tiny_model(tmp_path, vocab_size=64, padded_vocab_size=80))
    tokenizer = get_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("hi there 12\n")) == "hi there 12\n"
    config = ModelConfig(model_path=folder, dtype="float32")
    assert (config.vocab_size, config.context_len, config.num_key_value_heads) == (80, 2048, 2)

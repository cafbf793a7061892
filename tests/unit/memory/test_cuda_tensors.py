"""Checksums of units: against numpy, and what they notice."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_nightjar.memory.cuda_tensors import unit_digests


@given(units=st.integers(1, 5), words=st.integers(1, 9), seed=st.integers(0, 99))
def test_a_unit_is_the_xor_of_its_words(units: int, words: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, units * words * 8, dtype=np.uint8)
    expected = np.bitwise_xor.reduce(data.view(np.uint64).reshape(units, words), axis=1)
    found = unit_digests(torch.from_numpy(data), words * 8)
    assert found.dtype == torch.uint64 and (found.numpy() == expected).all()


@given(bit=st.integers(0, 8 * 256 - 1), seed=st.integers(0, 99))
def test_any_changed_bit_and_any_unit_elsewhere_is_noticed(bit: int, seed: int) -> None:
    data = torch.randint(0, 256, (256,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    before = unit_digests(data, 64)
    changed = data.clone()
    changed[bit // 8] ^= 1 << bit % 8
    assert not torch.equal(unit_digests(changed, 64), before)
    moved = torch.cat([data[64:128], data[:64], data[128:]])
    assert not torch.equal(unit_digests(moved, 64), before)


def test_parts_of_units_are_refused() -> None:
    for nbytes, unit in ((100, 64), (96, 12)):
        with pytest.raises(AssertionError, match=f"{nbytes} bytes in units of {unit}"):
            unit_digests(torch.zeros(nbytes, dtype=torch.uint8), unit)

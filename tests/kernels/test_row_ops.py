"""RMSNorm and rotary embedding against their references, and rows that do not depend on their neighbours."""

import pytest
import torch

from sglang_nightjar.kernels.row_ops import rms_norm, rms_norm_reference, rotate, rotate_reference


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("columns", [1, 8, 576, 577])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(rows: int, columns: int, with_residual: bool) -> None:
    torch.manual_seed(rows + columns)
    x, weight = torch.randn(rows, columns) * 3, torch.randn(columns)
    residual = torch.randn(rows, columns) if with_residual else None
    before = x.clone()
    found, expected = rms_norm(x, weight, 1e-5, residual), rms_norm_reference(x, weight, 1e-5, residual)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(x, before)


def test_rms_norm_of_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(33, 576), torch.randn(33, 576), torch.randn(576)
    whole, total = rms_norm(x, weight, 1e-5, residual)
    for i in range(33):
        row, row_total = rms_norm(x[i : i + 1], weight, 1e-5, residual[i : i + 1])
        assert torch.equal(row[0], whole[i]) and torch.equal(row_total[0], total[i])


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("heads", "head_size", "rotary"), [(9, 64, 64), (3, 16, 8), (1, 2, 2)])
def test_rotate(neox: bool, heads: int, head_size: int, rotary: int) -> None:
    torch.manual_seed(heads)
    qkv = torch.randn(5, heads * head_size + 40)
    x = qkv[:, 16 : 16 + heads * head_size]  # a strided slice, as SGLang's split gives it
    positions = torch.tensor([0, 3, 3, 99, 1])
    angles = torch.randn(100, rotary // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    found = rotate(x, positions, cos_sin, head_size, neox)
    assert found.is_contiguous()
    torch.testing.assert_close(found, rotate_reference(x, positions, cos_sin, head_size, neox), rtol=1e-5, atol=1e-6)

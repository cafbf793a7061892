"""Quantized linear layers against dequantization and a plain product in double precision."""

import pytest
import torch

from sglang_nightjar.kernels import int8_linear as int8
from sglang_nightjar.kernels.int8_linear import (
    QuantizedWeight,
    dequantize,
    int8_linear,
    int8_linear_reference,
    quantize_weight,
)

BITS = range(3, 9)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_matches_reference(x: torch.Tensor, qw: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
    out = int8_linear(x, *qw, bias)
    expected = int8_linear_reference(x, *qw, bias)
    assert out.dtype == torch.float32 and out.shape == expected.shape and out.is_contiguous()
    # Rounding errors of a float32 dot product grow with the terms it adds up.
    terms = torch.nn.functional.linear(x.abs(), dequantize(qw).abs()).max() if x.numel() else torch.tensor(0.0)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6 * float(terms) + 1e-6)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [0, 16, 64, 1])
def test_quantize_stays_in_range_and_close(bits: int, group_size: int) -> None:
    weight = randn(33, 192)
    q, scale = quantize_weight(weight, bits, group_size)
    top = 2 ** (bits - 1) - 1
    groups = 192 // group_size if group_size else 1
    assert q.dtype == torch.int8 and q.shape == weight.shape
    assert scale.dtype == torch.float32 and scale.shape == (33, groups)
    assert (scale > 0).all()
    assert q.abs().max() == top
    # Within half a step, unless the weight was clipped.
    error = (dequantize(QuantizedWeight(q, scale)) - weight).abs().view(33, groups, -1)
    clipped = q.abs().view(33, groups, -1) == top
    half_step = (scale / 2).unsqueeze(2).expand_as(error)
    assert (error[~clipped] <= half_step[~clipped] * (1 + 1e-5) + 1e-6).all()


@pytest.mark.parametrize("group_size", [0, 64])
def test_error_falls_with_every_bit(group_size: int) -> None:
    weight = randn(64, 576)
    errors = [(dequantize(quantize_weight(weight, bits, group_size)) - weight).square().mean() for bits in BITS]
    assert all(fewer > 2.5 * more for fewer, more in zip(errors, errors[1:], strict=False)), errors


def test_smaller_groups_lose_less() -> None:
    weight = randn(64, 576)
    errors = [
        (dequantize(quantize_weight(weight, 4, group_size)) - weight).square().mean() for group_size in (0, 64, 16)
    ]
    assert errors[0] > errors[1] > errors[2], errors


@pytest.mark.parametrize("bits", [3, 4, 5, 6])
def test_search_over_clip_ratios_pays_and_is_the_best_of_the_grid(bits: int) -> None:
    weight = randn(16, 576)
    weight[:, 0] *= 3  # an outlier per row
    top = 2 ** (bits - 1) - 1
    exact = weight.abs().amax(1, keepdim=True) / top
    candidates = []
    for ratio in int8.CLIP_RATIOS:
        scale = exact * ratio
        candidates.append((((weight / scale).round().clamp(-top, top) * scale - weight) ** 2).sum(1))
    error = ((dequantize(quantize_weight(weight, bits)) - weight) ** 2).sum(1)
    torch.testing.assert_close(error, torch.stack(candidates).amin(0))
    assert error.sum() < 0.99 * candidates[0].sum()


def test_search_in_chunks_gives_what_one_chunk_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = randn(37, 96)
    whole = quantize_weight(weight, 4, 32)
    monkeypatch.setattr(int8, "QUANTIZE_ELEMENTS", 5 * 32)
    pieces = quantize_weight(weight, 4, 32)
    assert torch.equal(whole.q, pieces.q) and torch.equal(whole.scale, pieces.scale)


def test_integers_survive_exactly() -> None:
    weight = torch.arange(-127, 128, dtype=torch.float32).repeat(3, 1) * 0.5
    q, scale = quantize_weight(weight, 8)
    assert torch.equal(q, torch.arange(-127, 128, dtype=torch.int8).repeat(3, 1))
    assert torch.equal(scale, torch.full((3, 1), 0.5))


@pytest.mark.parametrize("bits", [3, 8])
def test_zero_rows_and_groups_of_the_weight(bits: int) -> None:
    weight = randn(4, 32)
    weight[1] = 0
    weight[2, :16] = 0
    qw = quantize_weight(weight, bits, 16)
    assert torch.isfinite(qw.scale).all()
    assert (dequantize(qw)[1] == 0).all() and (dequantize(qw)[2, :16] == 0).all()
    assert (int8_linear(randn(3, 32), *qw)[:, 1] == 0).all()


# 1 | 2: the kernel changes; 42 | 43, 112 | 113, 64 | 65: x is cut into panels (K = 1536, 576, 1024);
# odd numbers: the last row has no partner.
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 7, 8, 16, 42, 43, 64, 65, 112, 113, 300])
@pytest.mark.parametrize(("n", "k", "group_size"), [(96, 576, 0), (50, 1536, 64), (7, 1024, 256), (41, 1025, 0)])
def test_matches_reference(rows: int, n: int, k: int, group_size: int) -> None:
    qw = quantize_weight(randn(n, k), 8, group_size)
    assert_matches_reference(randn(rows, k, seed=1), qw, randn(n, seed=2))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("k", [1, 2, 7, 8, 9, 31, 33, 100])
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_any_shape(n: int, k: int, rows: int) -> None:
    assert_matches_reference(randn(rows, k, seed=1), quantize_weight(randn(n, k), 8))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [0, 1, 3, 64])
@pytest.mark.parametrize("rows", [1, 5])
def test_bits_and_groups(bits: int, group_size: int, rows: int) -> None:
    assert_matches_reference(randn(rows, 192, seed=1), quantize_weight(randn(20, 192), bits, group_size))


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("n", [1, 3, 9, 130])
def test_any_division_of_labour_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, rows: int, n: int) -> None:
    x, qw = randn(rows, 100, seed=1), quantize_weight(randn(n, 100), 8)
    expected = int8_linear(x, *qw)
    for shares in (1, 2, 3, 40):  # also more shares than threads, and than output rows
        monkeypatch.setattr(int8, "get_num_threads", lambda shares=shares: shares)
        assert torch.equal(int8_linear(x, *qw), expected), shares


@pytest.mark.parametrize("k", [33, 576, 1536])
def test_row_does_not_depend_on_the_number_of_rows_from_two_on(k: int) -> None:
    x, qw = randn(150, k, seed=1), quantize_weight(randn(30, k), 8)
    everything = int8_linear(x, *qw)
    for rows in (2, 3, 4, 5, 8, 42, 43, 64, 113, 149):
        assert torch.equal(int8_linear(x[:rows], *qw), everything[:rows]), rows
        assert torch.equal(int8_linear(x[-rows:], *qw), everything[-rows:]), rows


@pytest.mark.parametrize("rows", [1, 4])
def test_bias(rows: int) -> None:
    x, qw, bias = randn(rows, 64, seed=1), quantize_weight(randn(24, 64), 8), randn(24, seed=2)
    assert torch.equal(int8_linear(x, *qw, bias), int8_linear(x, *qw) + bias)


def test_leading_dimensions() -> None:
    qw = quantize_weight(randn(10, 32), 8)
    x = randn(2, 3, 5, 32, seed=1)
    assert torch.equal(int8_linear(x, *qw), int8_linear(x.view(30, 32), *qw).view(2, 3, 5, 10))
    assert int8_linear(x[0, 0, 0], *qw).shape == (10,)
    assert int8_linear(x[:, :0], *qw).shape == (2, 0, 5, 10)


def test_strided_x_and_inference_mode() -> None:
    qw = quantize_weight(randn(10, 32), 8)
    wide = randn(6, 64, seed=1)
    with torch.inference_mode():
        assert_matches_reference(wide[:, :32], qw)
        assert_matches_reference(randn(32, 6, seed=1).t(), qw)
        assert_matches_reference(wide[:1, ::2], qw)


@pytest.mark.parametrize("rows", [1, 2])
def test_nothing_but_the_result_is_written(rows: int) -> None:
    x, qw = randn(rows, 40, seed=1), quantize_weight(randn(6, 40), 8)
    before = x.clone(), qw.q.clone(), qw.scale.clone()
    int8_linear(x, *qw, randn(6, seed=2))
    assert all(torch.equal(a, b) for a, b in zip(before, (x, *qw), strict=True))


@pytest.mark.parametrize(
    ("name", "weight", "bits", "group_size"),
    [
        ("weight", randn(4, 8).double(), 8, 0),
        ("weight", randn(4), 8, 0),
        ("weight", randn(4, 0), 8, 0),
        ("weight", torch.full((2, 8), torch.nan), 8, 0),
        ("weight", torch.full((2, 8), torch.inf), 4, 0),
        ("bits", randn(4, 8), 2, 0),
        ("bits", randn(4, 8), 9, 0),
        ("bits", randn(4, 8), 4.5, 0),
        ("group_size", randn(4, 8), 8, 3),
        ("group_size", randn(4, 8), 8, 16),
        ("group_size", randn(4, 8), 8, -4),
    ],
)
def test_quantize_rejects(name: str, weight: torch.Tensor, bits: int, group_size: int) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must"):
        quantize_weight(weight, bits, group_size)


X, Q, SCALE = torch.zeros(2, 8), torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 1)


@pytest.mark.parametrize(
    ("name", "x", "q", "scale", "bias"),
    [
        ("x", X.double(), Q, SCALE, None),
        ("x", torch.zeros(2, 7), Q, SCALE, None),
        ("x", torch.tensor(1.0), Q, SCALE, None),
        ("q", X, Q.float(), SCALE, None),
        ("q", X, Q[0], SCALE, None),
        ("q", X, torch.zeros(8, 4, dtype=torch.int8).t(), SCALE, None),
        ("scale", X, Q, SCALE.double(), None),
        ("scale", X, Q, SCALE[:3], None),
        ("scale", X, Q, SCALE[:, 0], None),
        ("scale", X, Q, torch.ones(4, 3), None),
        ("scale", X, Q, torch.ones(4, 0), None),
        ("scale", X, Q, torch.ones(2, 4).t(), None),
        ("bias", X, Q, SCALE, torch.zeros(3)),
        ("bias", X, Q, SCALE, torch.zeros(4).double()),
    ],
)
def test_linear_rejects(
    name: str, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must"):
        int8_linear(x, q, scale, bias)

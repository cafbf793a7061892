"""Prepacked linear layers against a plain product in double precision."""

import gc
import weakref

import pytest
import torch

from sglang_nightjar.kernels import packed_linear
from sglang_nightjar.kernels.packed_linear import PackedLinear, packed_linear_available, packed_linear_reference

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN, so no packed linear"
)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_matches_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    out = PackedLinear(weight, bias)(x)
    expected = packed_linear_reference(x, weight, bias)
    assert out.dtype == torch.float32 and out.shape == expected.shape and out.is_contiguous()
    # Rounding errors of a float32 dot product grow with the terms it adds up.
    terms = torch.nn.functional.linear(x.abs(), weight.abs()).max() if x.numel() else torch.tensor(0.0)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6 * float(terms) + 1e-6)


def test_available() -> None:
    assert packed_linear_available()


# Rows around the batch hint, and prefills.
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 8, 15, 16, 17, 32, 64, 65, 1000, 2048])
@pytest.mark.parametrize(("n", "k"), [(96, 576), (64, 1536), (31, 577)])
def test_matches_reference(rows: int, n: int, k: int) -> None:
    assert_matches_reference(randn(rows, k, seed=1), randn(n, k))
    assert_matches_reference(randn(rows, k, seed=1), randn(n, k), randn(n, seed=2))


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 33])
@pytest.mark.parametrize("k", [1, 3, 8, 17, 100])
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_any_shape(n: int, k: int, rows: int) -> None:
    assert_matches_reference(randn(rows, k, seed=1), randn(n, k), randn(n, seed=2))


def test_leading_dimensions() -> None:
    linear, x = PackedLinear(randn(10, 32)), randn(2, 3, 5, 32, seed=1)
    assert torch.equal(linear(x), linear(x.view(30, 32)).view(2, 3, 5, 10))
    assert linear(x[0, 0, 0]).shape == (10,)
    assert linear(x[:, :0]).shape == (2, 0, 5, 10)


def test_strided_inputs() -> None:
    wide = randn(6, 64, seed=1)
    assert_matches_reference(wide[:, :32], randn(10, 32))
    assert_matches_reference(randn(32, 6, seed=1).t(), randn(10, 32))
    assert_matches_reference(wide[:, :32], randn(32, 10).t())


def test_inference_mode() -> None:
    weight, x = randn(10, 32), randn(3, 32, seed=1)
    with torch.inference_mode():
        packed_inside = PackedLinear(weight)
        inside = packed_inside(x)
    assert torch.equal(PackedLinear(weight)(x), inside)
    assert torch.equal(packed_inside(x), inside)


def test_keeps_a_copy_and_not_the_weight() -> None:
    weight, x = randn(48, 64), randn(4, 64, seed=1)
    linear = PackedLinear(weight)
    before = linear(x)
    weight.zero_()
    assert torch.equal(linear(x), before)
    gone = weakref.ref(weight)
    del weight
    gc.collect()
    assert gone() is None
    assert torch.equal(linear(x), before)


def test_parameter_with_gradient_can_be_packed() -> None:
    parameter = torch.nn.Parameter(randn(10, 32))
    out = PackedLinear(parameter)(randn(3, 32, seed=1))
    assert not out.requires_grad


@pytest.mark.parametrize(
    ("name", "weight", "bias"),
    [
        ("weight", randn(4, 8).double(), None),
        ("weight", randn(4), None),
        ("weight", randn(0, 8), None),
        ("bias", randn(4, 8), randn(3)),
        ("bias", randn(4, 8), randn(4).double()),
    ],
)
def test_rejects_bad_weights(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must"):
        PackedLinear(weight, bias)


@pytest.mark.parametrize("x", [randn(2, 7), randn(2, 8).double(), torch.tensor(1.0)])
def test_rejects_bad_input(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="^x must"):
        PackedLinear(randn(4, 8))(x)


def test_missing_operators_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear.torch.backends.mkldnn, "is_available", lambda: False)
    assert not packed_linear_available()
    with pytest.raises(RuntimeError, match="mkldnn"):
        PackedLinear(randn(4, 8))

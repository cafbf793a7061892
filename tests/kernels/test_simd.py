"""The vector operations that numba kernels are written in."""

from __future__ import annotations

import numpy as np
from numba import njit

from sglang_nightjar.kernels import simd


@njit
def _map(x, y, function):
    for i in range(0, x.size, simd.LANES):
        value = simd.load(x, i)
        simd.store(y, i, simd.exp(value) if function == 0 else simd.tanh(value))


def _apply(x: np.ndarray, function: int) -> np.ndarray:
    y = np.empty_like(x)
    _map(x, y, function)
    return y


def test_exp_is_within_two_units_in_the_last_place():
    x = np.linspace(-87, 80, 1 << 20).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(_apply(x, 0) - exact) / np.spacing(exact.astype(np.float32))) < 2


def test_exp_of_special_values():
    x = np.array([-np.inf, -1e30, -100, -88, 0, -0.0, np.nan, -87.8], np.float32)
    np.testing.assert_array_equal(_apply(x, 0), np.array([0, 0, 0, 0, 1, 1, np.nan, 0], np.float32))


def test_tanh():
    x = np.linspace(-30, 30, 1 << 20).astype(np.float32)
    assert np.max(np.abs(_apply(x, 1) - np.tanh(x.astype(np.float64)))) < 2e-7
    special = np.array([-np.inf, np.inf, np.nan, 0, 0, 0, 0, 0], np.float32)
    np.testing.assert_allclose(_apply(special, 1), np.tanh(special), atol=2e-7)


@njit
def _transpose(source, rows, target, stride):
    simd.transpose(source, rows, target, 3, stride)


def test_transpose():
    source = np.arange(500, dtype=np.float32)
    rows = (40, 0, 8, 301, 77, 16, 200, 400)
    target = np.full(200, -1, np.float32)
    _transpose(source, rows, target, 20)
    expected = np.full(200, -1, np.float32)
    for i, row in enumerate(rows):
        expected[3 + i : 3 + i + 8 * 20 : 20] = source[row : row + 8]
    np.testing.assert_array_equal(target, expected)


@njit
def _reduce(x):
    value = simd.load(x, 0)
    return simd.lane_sum(value), simd.lane_max(value), simd.first(value)


def test_reductions_add_in_the_order_they_promise():
    x = np.array([1, 2.0**25, -3, 5, 1e-3, -(2.0**25), 7, 11], np.float32)
    total, largest, first = _reduce(x)
    a, b, c, d = (x[i] + x[i + 4] for i in range(4))
    assert total == (a + c) + (b + d)
    assert (largest, first) == (2.0**25, 1)
    assert _reduce(np.full(8, -np.inf, np.float32))[1] == -np.inf


@njit
def _fetch_add(x):
    return simd.fetch_add(x, 1, 5)


def test_fetch_add():
    x = np.array([7, 8, 9])
    assert (_fetch_add(x), _fetch_add(x)) == (8, 13)
    assert x.tolist() == [7, 18, 9]

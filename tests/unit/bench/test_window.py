"""Throughput while requests came."""

import numpy as np
import pytest
from window import window


def even(first: float, last: float, parts: int) -> np.ndarray:
    return np.linspace(first, last, parts)


def test_an_open_loop_ends_with_the_last_request_sent() -> None:
    sent = np.array([1.0, 5.0])
    rate, seconds = window(sent, [even(2.0, 10.0, 9), even(6.0, 9.0, 4)], np.array([9, 4]), None)
    assert seconds == 4.0
    assert rate == pytest.approx(4 / 4.0)  # tokens at 2, 3, 4, 5; the second request's are later


def test_a_closed_loop_ends_when_a_client_has_nothing_more_to_send() -> None:
    sent = np.array([0.0, 0.0, 4.0])
    chunks = [even(1.0, 4.0, 4), even(1.0, 6.0, 6), even(5.0, 8.0, 4)]
    rate, seconds = window(sent, chunks, np.array([4, 6, 4]), 2)
    assert seconds == 6.0  # the second client's end
    assert rate == pytest.approx((4 + 6 + 2) / 6.0)


def test_what_comes_late_and_fast_is_not_counted_early() -> None:
    # Ten tokens while requests come, then ninety as the batch empties.
    chunks = np.concatenate([np.linspace(0.0, 10.0, 11), 10.0 + np.linspace(0.1, 9.0, 90)])
    rate, seconds = window(np.array([0.0, 10.0]), [chunks, np.array([10.5])], np.array([101, 1]), None)
    assert seconds == 10.0
    assert rate == pytest.approx(11 / 10.0)


def test_parts_of_several_tokens_are_shared_evenly() -> None:
    rate, _ = window(np.array([0.0, 5.0]), [np.array([1.0, 4.0, 7.0]), np.array([6.0])], np.array([13, 1]), None)
    assert rate == pytest.approx((1 + 6 + 2) / 5.0)

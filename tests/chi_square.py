"""Test support: chi-square tests of sampled tokens."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from scipy import stats

MIN_EXPECTED = 5.0  # samples a bin must expect, in each of the samples compared


def p_value_of_two_samples(first: Iterable[Hashable], second: Iterable[Hashable]) -> float:
    """How likely samples of one distribution are to differ as much as these; rare outcomes share one bin."""
    a, b = Counter(first), Counter(second)
    smaller_share = min(a.total(), b.total()) / (a.total() + b.total())
    table: list[tuple[int, int]] = []
    rest = np.zeros(2, int)
    for outcome in a.keys() | b.keys():
        row = (a[outcome], b[outcome])
        if sum(row) * smaller_share >= MIN_EXPECTED:
            table.append(row)
        else:
            rest += row
    if rest.sum() * smaller_share >= MIN_EXPECTED:
        table.append(tuple(rest.tolist()))
    assert table, "no outcome is frequent enough for a bin of its own"
    if len(table) == 1:
        return 1.0
    return float(stats.chi2_contingency(np.array(table), correction=False).pvalue)


def p_value_of_sample(counts: Sequence[int] | np.ndarray, probabilities: Sequence[float] | np.ndarray) -> float:
    """How likely a sample of this distribution is to be as far from it as `counts`."""
    counts, expected = np.asarray(counts), np.asarray(probabilities) * np.sum(counts)
    common = expected >= MIN_EXPECTED
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    bins = expected >= MIN_EXPECTED
    statistic = ((observed - expected)[bins] ** 2 / expected[bins]).sum()
    return float(stats.chi2.sf(statistic, bins.sum() - 1))

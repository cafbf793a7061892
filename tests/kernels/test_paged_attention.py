"""`paged_attention` against its float64 reference, and the same bits for the same query in any call."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_nightjar.kernels.paged_attention import paged_attention, paged_attention_reference
from sglang_nightjar.kernels.paged_attention_tile import TILE


class Case(NamedTuple):
    """Arguments of one call, in order."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    query_start: torch.Tensor
    kv_lens: torch.Tensor
    scale: float


def make_case(
    requests: list[tuple[int, int]],
    heads: tuple[int, int] = (9, 3),
    dims: tuple[int, int] = (64, 64),
    page: int = 1,
    seed: int = 0,
) -> Case:
    """Requests of (queries, keys), their KV slots shuffled page by page, in table rows picked at random."""
    g = torch.Generator().manual_seed(seed)
    batch = len(requests)
    longest = max((keys for _, keys in requests), default=0)
    pages = [-(-keys // page) for _, keys in requests]
    slots = (sum(pages) + 3) * page
    free = iter((torch.randperm(sum(pages) + 2, generator=g) + 1).tolist())  # page 0 is the dummy
    table = torch.full((batch + 2, longest + 5), -7, dtype=torch.int32)  # what is not ours must not be read
    rows = torch.randperm(batch + 2, generator=g)[:batch]
    for row, (_, keys), count in zip(rows.tolist(), requests, pages, strict=True):
        starts = torch.tensor([next(free) * page for _ in range(count)], dtype=torch.int32)
        table[row, :keys] = (starts[:, None] + torch.arange(page, dtype=torch.int32)).flatten()[:keys]
    starts = torch.tensor([0, *(queries for queries, _ in requests)]).cumsum(0)
    return Case(
        torch.randn(int(starts[-1]), heads[0], dims[0], generator=g) * 2,
        torch.randn(slots, heads[1], dims[0], generator=g),
        torch.randn(slots, heads[1], dims[1], generator=g),
        table,
        rows,
        starts,
        torch.tensor([keys for _, keys in requests], dtype=torch.int64),
        dims[0] ** -0.5,
    )


def check(case: Case, atol: float = 2e-5, **options: Any) -> torch.Tensor:
    out = paged_attention(*case, **options)
    torch.testing.assert_close(out, paged_attention_reference(*case, **options), rtol=1e-5, atol=atol)
    return out


MIXED = [(1, 300), (6, 6), (37, 37), (0, 12), (5, 140), (70, 330), (1, 1), (4, 129), (1, 128)]


@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 1), (12, 2), (49, 1)])
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (80, 80), (128, 128), (24, 40)])
def test_mixed_batch(heads, dims):
    """Decode, prefill, extends and draft chains in one call."""
    check(make_case(MIXED, heads, dims))


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([(1, 2000)], id="long decode"),
        pytest.param([(1, 5), (1, 260), (1, 500), (1, 31)], id="decode"),
        pytest.param([(6, 200), (6, 6), (6, 513)], id="verify"),
        pytest.param([(200, 200), (3, 3)], id="prefill"),
        pytest.param([(150, 2000), (20, 90)], id="extend"),
    ],
)
def test_each_kind_of_call(requests, page):
    check(make_case(requests, page=page))


@pytest.mark.parametrize("window", [0, 1, 20, 127, 128, 200, 5000])
def test_sliding_window(window):
    check(make_case(MIXED), window=window)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_logit_cap(cap):
    case = make_case(MIXED)
    capped = check(case, logit_cap=cap)
    assert (capped - paged_attention(*case)).abs().max() > 1e-3


def test_large_scores():
    case = make_case(MIXED)
    check(case._replace(q=case.q * 100), atol=1e-3)  # float32 holds scores of 1000 to about 1e-4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 400)), max_size=6),
    heads=st.sampled_from([(1, 1), (2, 1), (9, 3), (6, 6), (16, 2)]),
    dims=st.sampled_from([(8, 8), (16, 24), (64, 64)]),
    page=st.sampled_from([1, 16]),
    window=st.sampled_from([-1, -1, 3, 90]),
    cap=st.sampled_from([0.0, 0.0, 10.0]),
    threads=st.integers(1, numba.config.NUMBA_NUM_THREADS),
    seed=st.integers(0, 1000),
)
def test_any_layout(requests, heads, dims, page, window, cap, threads, seed):
    case = make_case([(n, n + prefix) for n, prefix in requests], heads, dims, page, seed)
    before = numba.get_num_threads()
    numba.set_num_threads(threads)
    try:
        check(case, window=window, logit_cap=cap)
    finally:
        numba.set_num_threads(before)


def test_strided_tensors_are_used_in_place():
    """Caches that are slices of a larger pool, queries inside a fused QKV, a padded table, an output view."""
    case = make_case(MIXED)
    slots = case.k_cache.shape[0]
    pool = torch.full((slots, 2, 3, 2, 64), float("nan"))
    pool[:, 0, :, 1], pool[:, 1, :, 0] = case.k_cache, case.v_cache
    qkv = torch.full((len(case.q), 15 * 64 + 8), float("nan"))
    qkv[:, 8 : 8 + 9 * 64] = case.q.flatten(1)
    table = torch.full((case.req_to_token.shape[0], 900), -1, dtype=torch.int32)
    table[:, 30 : 30 + case.req_to_token.shape[1]] = case.req_to_token
    result = torch.zeros(len(case.q), 10, 64)
    strided = case._replace(
        q=qkv[:, 8 : 8 + 9 * 64].view(-1, 9, 64),
        k_cache=pool[:, 0, :, 1],
        v_cache=pool[:, 1, :, 0],
        req_to_token=table[:, 30 : 30 + case.req_to_token.shape[1]],
        req_pool_indices=case.req_pool_indices.repeat_interleave(2)[::2],
    )
    view = result[:, 1:]
    assert paged_attention(*strided, out=view) is view
    assert torch.equal(view, paged_attention(*case))
    assert result[:, 0].eq(0).all()


def test_index_types():
    case = make_case(MIXED)
    narrow = case._replace(
        req_pool_indices=case.req_pool_indices.int(), query_start=case.query_start.int(), kv_lens=case.kv_lens.int()
    )
    assert torch.equal(paged_attention(*narrow), paged_attention(*case))


@pytest.mark.parametrize("requests", [[], [(0, 9)], [(0, 0), (0, 3)]])
def test_nothing_to_do(requests):
    assert paged_attention(*make_case(requests)).shape == (0, 9, 64)


def part(case: Case, b: int, begin: int, end: int) -> Case:
    """Queries begin to end of request b, as a call of their own."""
    start, total = int(case.query_start[b]), int(case.query_start[b + 1] - case.query_start[b])
    return case._replace(
        q=case.q[start + begin : start + end],
        req_pool_indices=case.req_pool_indices[b : b + 1],
        query_start=torch.tensor([0, end - begin]),
        kv_lens=case.kv_lens[b : b + 1] - (total - end),
    )


@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize("options", [{}, {"window": 150}, {"logit_cap": 5.0}])
def test_a_query_has_the_same_bits_in_any_call(heads, options):
    """Inside a mixed batch, as a decode, as part of a verify chain and of an extend."""
    case = make_case(MIXED, heads)
    together = paged_attention(*case, **options)
    for b, (queries, _) in enumerate(MIXED):
        start = int(case.query_start[b])
        for step in (1, 3, 6, 41):
            for j in range(0, queries, step):
                end = min(queries, j + step)
                alone = paged_attention(*part(case, b, j, end), **options)
                assert torch.equal(alone, together[start + j : start + end]), (b, j, end)


@pytest.mark.parametrize("requests", [[(1, 2000)], [(6, 1100)], [(1, 300), (1, 900)], [(130, 700)]])
@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="needs two threads")
def test_threads_do_not_change_a_bit(requests):
    """With two threads the keys of few requests are split; the result must not show it."""
    case = make_case(requests, (8, 1))
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        one = paged_attention(*case)
        numba.set_num_threads(2)
        for _ in range(5):
            assert torch.equal(paged_attention(*case), one)
    finally:
        numba.set_num_threads(before)


def test_a_query_ignores_later_keys_and_other_requests():
    case = make_case([(4, TILE + 2), (3, 50)])
    before = paged_attention(*case)
    last = case.req_to_token[case.req_pool_indices[0], TILE + 1].item()
    other = case.req_to_token[case.req_pool_indices[1], :50].long()
    case.k_cache[last] = 1e3
    case.v_cache[last] = 1e3
    case.k_cache[other] = float("nan")
    after = paged_attention(*case)
    assert torch.equal(after[:3], before[:3])
    assert not torch.equal(after[3], before[3])
    assert after[4:].isnan().all()


def test_nan_is_not_hidden():
    case = make_case([(3, 400), (2, 20)])
    case.q[1, 4] = float("nan")
    out = paged_attention(*case)
    assert out[1, 4].isnan().all()
    assert out.isnan().any(dim=-1).sum() == 1


def bad(name: str, change: Any) -> Any:
    return pytest.param(name, change, id=f"{name}-{change.__code__.co_firstlineno}")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        bad("q", lambda c: c._replace(q=c.q[0])),
        bad("q", lambda c: c._replace(q=c.q.double())),
        bad("q", lambda c: c._replace(q=c.q.repeat_interleave(2, dim=-1)[..., ::2])),
        bad("k_cache", lambda c: c._replace(k_cache=c.k_cache[..., :56])),
        bad("k_cache", lambda c: c._replace(q=c.q[..., :12], k_cache=c.k_cache[..., :12])),
        bad("k_cache", lambda c: c._replace(k_cache=c.k_cache[:, :2], v_cache=c.v_cache[:, :2])),
        bad("k_cache", lambda c: c._replace(k_cache=c.k_cache[:0], v_cache=c.v_cache[:0])),
        bad("k_cache", lambda c: c._replace(k_cache=c.k_cache.half())),
        bad("v_cache", lambda c: c._replace(v_cache=c.v_cache[..., :20])),
        bad("v_cache", lambda c: c._replace(v_cache=c.v_cache[:-1])),
        bad("v_cache", lambda c: c._replace(v_cache=c.v_cache[:, :1])),
        bad("req_to_token", lambda c: c._replace(req_to_token=c.req_to_token.long())),
        bad("req_to_token", lambda c: c._replace(req_to_token=c.req_to_token[0])),
        bad("req_to_token", lambda c: c._replace(req_to_token=c.req_to_token + len(c.k_cache))),
        bad("req_to_token", lambda c: c._replace(req_to_token=c.req_to_token - len(c.k_cache))),
        bad("req_pool_indices", lambda c: c._replace(req_pool_indices=c.req_pool_indices + 10)),
        bad("req_pool_indices", lambda c: c._replace(req_pool_indices=c.req_pool_indices - 10)),
        bad("req_pool_indices", lambda c: c._replace(req_pool_indices=c.req_pool_indices.float())),
        bad("query_start", lambda c: c._replace(query_start=c.query_start[:-1])),
        bad("query_start", lambda c: c._replace(query_start=c.query_start + 1)),
        bad("query_start", lambda c: c._replace(query_start=torch.tensor([0, 3, 4]))),
        bad("query_start", lambda c: c._replace(query_start=torch.tensor([0, 9, 6]))),
        bad("kv_lens", lambda c: c._replace(kv_lens=c.kv_lens[:-1])),
        bad("kv_lens", lambda c: c._replace(kv_lens=torch.tensor([3, 3]))),
        bad("kv_lens", lambda c: c._replace(kv_lens=torch.tensor([40, 31]))),
    ],
)
def test_errors_name_the_argument(name, change):
    case = make_case([(4, 25), (2, 7)])
    assert case.req_to_token.shape[1] == 30
    with pytest.raises(ValueError, match=f"^{name}"):
        paged_attention(*change(case))


@pytest.mark.parametrize("out", [torch.zeros(6, 9, 32), torch.zeros(6, 9, 64).double(), torch.zeros(6, 9 * 64)])
def test_out_is_checked(out):
    with pytest.raises(ValueError, match="^out"):
        paged_attention(*make_case([(4, 25), (2, 7)]), out=out)

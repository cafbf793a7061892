"""A whole decoder layer against the references of its parts."""

import pytest
import torch

from sglang_nightjar.kernels.int8_linear import quantize_weight
from sglang_nightjar.kernels.llama_layer import LayerShape, LayerWeights, llama_layer, llama_layer_reference

HIDDEN, HEADS, KV_HEADS, DIM, INNER, SLOTS, CONTEXT = 64, 6, 2, 16, 96, 80, 40


def make_weights(bits: int, group: int) -> LayerWeights:
    def linear(outputs: int, inputs: int) -> object:
        return quantize_weight(torch.randn(outputs, inputs) * inputs**-0.5, bits, group)

    return LayerWeights(
        1 + 0.1 * torch.randn(HIDDEN),
        1 + 0.1 * torch.randn(HIDDEN),
        linear((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
        linear(HIDDEN, HEADS * DIM),
        linear(2 * INNER, HIDDEN),
        linear(HIDDEN, INNER),
    )


@pytest.mark.parametrize(("bits", "group"), [(8, 0), (4, 32)])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(
    ("starts", "stops"),
    [([0], [1]), ([13], [14]), ([5, 0, 20], [6, 1, 21]), ([0, 7], [9, 30]), ([3, 8, 1], [5, 9, 4])],
    ids=["first token", "decode", "decode of three", "prefill", "catch-up"],
)
def test_layer(bits: int, group: int, neox: bool, starts: list[int], stops: list[int]) -> None:
    torch.manual_seed(bits + len(starts))
    weights = make_weights(bits, group)
    shape = LayerShape(HEADS, KV_HEADS, DIM, neox, 1e-5, DIM**-0.5)
    table = torch.randperm(SLOTS, dtype=torch.int32)[: 2 * CONTEXT].view(2, CONTEXT)
    table = torch.cat([table, torch.randperm(SLOTS, dtype=torch.int32)[:CONTEXT].view(1, CONTEXT)])
    counts = torch.tensor(stops) - torch.tensor(starts)
    positions = torch.cat([torch.arange(a, b) for a, b in zip(starts, stops, strict=True)])
    requests = torch.arange(len(starts))
    rows = requests.repeat_interleave(counts)
    angles = torch.randn(CONTEXT, DIM // 2)
    shared = {
        "positions": positions,
        "cos_sin": torch.cat([angles.cos(), angles.sin()], dim=-1),
        "slots": table[rows, positions].long(),
        "req_to_token": table,
        "req_pool_indices": requests,
        "query_start": torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        "kv_lens": torch.tensor(stops),
    }
    x = torch.randn(len(positions), HIDDEN)
    k_cache, v_cache = torch.randn(SLOTS, KV_HEADS, DIM), torch.randn(SLOTS, KV_HEADS, DIM)
    expected, k_expected, v_expected = x.clone(), k_cache.clone(), v_cache.clone()
    llama_layer(x, weights, shape, k_cache=k_cache, v_cache=v_cache, **shared)
    llama_layer_reference(expected, weights, shape, k_cache=k_expected, v_cache=v_expected, **shared)
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(k_cache, k_expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(v_cache, v_expected, rtol=1e-4, atol=1e-4)


def test_an_index_out_of_range_is_refused() -> None:
    torch.manual_seed(0)
    table = torch.full((1, 4), SLOTS, dtype=torch.int32)
    table[0, 1] = 3
    with pytest.raises(ValueError, match="out of range"):
        llama_layer(
            torch.randn(1, HIDDEN),
            make_weights(8, 0),
            LayerShape(HEADS, KV_HEADS, DIM, True, 1e-5, 0.25),
            positions=torch.tensor([1]),
            cos_sin=torch.ones(4, DIM),
            slots=torch.tensor([3]),
            k_cache=torch.zeros(SLOTS, KV_HEADS, DIM),
            v_cache=torch.zeros(SLOTS, KV_HEADS, DIM),
            req_to_token=table,
            req_pool_indices=torch.tensor([0]),
            query_start=torch.tensor([0, 1]),
            kv_lens=torch.tensor([2]),
        )

"""Seam: the lists of names SGLang's command line accepts, and its registries behind them."""

from typing import Any

from sglang.srt.arg_groups.choices import (
    add_attention_backend_choices,
    add_deterministic_attention_backend_choices,
    add_draft_attention_backend_choices,
    add_quantization_method_choices,
    add_radix_supported_deterministic_attention_backend_choices,
)
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.quantization import QUANTIZATION_METHODS as UPSTREAM_METHODS

from sglang_nightjar.platform.attention import PagedCpuAttentionBackend
from sglang_nightjar.platform.names import ATTENTION_BACKEND
from sglang_nightjar.platform.quantization import QUANTIZATION_METHODS


def install() -> None:
    """Makes the CPU attention backend and the weight-only widths selectable by name."""

    @register_attention_backend(ATTENTION_BACKEND)
    def create(runner: Any) -> PagedCpuAttentionBackend:
        return PagedCpuAttentionBackend(runner)

    add_attention_backend_choices([ATTENTION_BACKEND])
    add_draft_attention_backend_choices([ATTENTION_BACKEND])
    # A query row gives the same bits in any batch, with or without a cached prefix.
    add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    add_radix_supported_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    add_quantization_method_choices(list(QUANTIZATION_METHODS))
    UPSTREAM_METHODS.update(QUANTIZATION_METHODS)

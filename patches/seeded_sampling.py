"""Seam: what `--enable-deterministic-inference` needs of a device, a CPU extension and Triton kernels upstream.

With that flag SGLang draws each token from the request's `sampling_seed` and the token's
position alone, and swaps torch's matrix kernels for ones whose results do not depend on
the batch. On the CPU platform nothing is to be swapped: its prepacked linears and its
attention give a row the same bits in any batch already.
"""

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_nightjar.kernels.seed_hash import seed_hash
from sglang_nightjar.patches.hooks import require_applied

HASH = "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32"
SWAP_KERNELS = "sglang.srt.batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode"


def keep_kernels(enable_bmm: bool = True) -> None:
    """Leaves torch's kernels as they are (same arguments as upstream's function)."""


def install() -> None:
    """Replaces both functions wherever they were imported."""
    HookRegistry.register(HASH, seed_hash, HookType.REPLACE)
    HookRegistry.register(SWAP_KERNELS, keep_kernels, HookType.REPLACE)


def verify() -> None:
    """Raises `RuntimeError` where a replacement is not in place."""
    require_applied(HASH, SWAP_KERNELS)

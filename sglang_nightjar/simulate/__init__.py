"""A discrete-event simulator of continuous batching with speculative decoding (evidence level L1).

No model runs here: step times come from a roofline (`roofline`) or from measured points
(`measured`), acceptance from a random model (`acceptance`). The policies are the real ones.
"""

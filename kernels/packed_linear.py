# TEMPORARY STAND-IN by the lead, to boot a server; helper 2: overwrite this file with yours.
import torch


class PackedLinear:
    def __init__(self, weight, bias=None):
        self.w = weight
        self.b = bias

    def __call__(self, x):
        return torch.nn.functional.linear(x, self.w, self.b)

"""How long a step takes on a named GPU, from its public numbers: a roofline.

One forward over `tokens` new tokens, with `kv_tokens` tokens of context in the batch, takes

    max(2 * parameters * tokens / (tp * FLOP/s),  parameter bytes / (tp * bytes/s))     linear layers
    + kv_tokens * KV bytes per token / (tp * bytes/s)                                   attention's reading
    + launch_s + layers * layer_s                                                       kernel launches
    + all-reduces of the layers' outputs, when tp > 1

Left out: attention's own FLOPs (a few percent of a prefill's at the context lengths used here),
the input embedding (a look-up), and the gradual bend of a real roofline.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU.

    Attributes:
        peak_flops: dense FLOP/s at the weights' precision.
        flops_efficiency, bandwidth_efficiency: the share of the peak that kernels reach.
        bandwidth: device memory, bytes/s.
        memory_bytes: device memory.
        link_bytes_s: host to device, bytes/s, pinned memory.
        step_overhead_s: scheduler and sampling per step, not hidden behind the GPU.
        speculation_overhead_s: added by a speculative step (verification kernels, bookkeeping).
        launch_s: per forward. layer_s: per layer of a forward, gaps between its kernels.
        peer_bytes_s: between GPUs, bytes/s (tp > 1). allreduce_s: latency of one all-reduce.
    """

    name: str
    peak_flops: float
    bandwidth: float
    memory_bytes: float
    link_bytes_s: float
    flops_efficiency: float = 0.7
    bandwidth_efficiency: float = 0.85
    step_overhead_s: float = 1e-3
    speculation_overhead_s: float = 0.5e-3
    launch_s: float = 0.1e-3
    layer_s: float = 15e-6
    peer_bytes_s: float = 1e12
    allreduce_s: float = 20e-6


@dataclass(frozen=True, slots=True)
class Model:
    """One language model.

    Attributes:
        parameters: those a token is multiplied with (output head included, input embedding not).
        weight_bytes: what the weights occupy in device memory.
        bytes_per_parameter: as stored; 2 for bfloat16, 1 for FP8.
        kv_bytes: key and value bytes of one token, all layers.
        hidden: width of the residual stream, for all-reduces.
    """

    name: str
    parameters: float
    weight_bytes: float
    layers: int
    hidden: int
    kv_bytes: float
    bytes_per_parameter: float = 2.0


@dataclass(frozen=True, slots=True)
class SetUp:
    """A target and a draft on `tp` GPUs; both are sharded over all of them.

    `mem_fraction`: the share of device memory for weights and KV (the rest: activations, graphs).
    """

    name: str
    device: Device
    target: Model
    draft: Model
    tp: int = 1
    max_gamma: int = 5
    mem_fraction: float = 0.9

    def slots(self, resident: bool) -> int:
        """KV slots of the pool with the draft on the device (its KV beside the target's), or without it."""
        room = self.device.memory_bytes * self.tp * self.mem_fraction - self.target.weight_bytes
        per_slot = self.target.kv_bytes
        if resident:
            room -= self.draft.weight_bytes
            per_slot += self.draft.kv_bytes
        return max(0, int(room / per_slot))


class StepCost:
    """Seconds of everything a server does, by the roofline of `set_up`. Also see `measured.MeasuredCost`."""

    def __init__(self, set_up: SetUp) -> None:
        self.set_up = set_up
        self.max_gamma = set_up.max_gamma
        device, tp = set_up.device, set_up.tp
        self._flops = device.peak_flops * device.flops_efficiency * tp
        self._bandwidth = device.bandwidth * device.bandwidth_efficiency * tp
        # Of one kept KV slot: read and written once when it is relocated.
        self._relocate_s = 2.0 * (set_up.target.kv_bytes + set_up.draft.kv_bytes) / self._bandwidth
        self._target = self._coefficients(set_up.target)
        self._draft = self._coefficients(set_up.draft)

    def _coefficients(self, model: Model) -> tuple[float, float, float, float, float]:
        """(compute s/token, weights s, KV s/token, fixed s, all-reduce s/token) of one forward."""
        device, tp = self.set_up.device, self.set_up.tp
        fixed = device.launch_s + model.layers * device.layer_s
        reduce_s = 0.0
        if tp > 1:
            # Two per layer; a ring moves 2 (tp - 1) / tp of the bfloat16 activations through each link.
            fixed += 2 * model.layers * device.allreduce_s
            reduce_s = 2 * model.layers * model.hidden * 2 * 2 * (tp - 1) / tp / device.peer_bytes_s
        return (
            2.0 * model.parameters / self._flops,
            model.parameters * model.bytes_per_parameter / self._bandwidth,
            model.kv_bytes / self._bandwidth,
            fixed,
            reduce_s,
        )

    @staticmethod
    def _forward(c: tuple[float, float, float, float, float], tokens: float, kv_tokens: float) -> float:
        compute, weights, kv, fixed, reduce_s = c
        return max(compute * tokens, weights) + kv * kv_tokens + fixed + reduce_s * tokens

    def slots(self, resident: bool) -> int:
        """KV slots of the pool, with or without the draft."""
        return self.set_up.slots(resident)

    def decode_s(self, batch: int, kv_tokens: float) -> float:
        """A step at gamma 0 of `batch` requests, `kv_tokens` of context together."""
        return self.step_s(batch, 0, kv_tokens)

    def draft_s(self, batch: int, gamma: int, kv_tokens: float) -> float:
        """`gamma` draft forwards, one after the other."""
        if gamma == 0 or batch == 0:
            return 0.0
        return gamma * self._forward(self._draft, batch, kv_tokens)

    def verify_s(self, tokens: float, kv_tokens: float) -> float:
        """The target's forward over `tokens` tokens: batch * (gamma + 1) where all is verified."""
        return self._forward(self._target, tokens, kv_tokens)

    def step_s(
        self,
        batch: int,
        gamma: int,
        kv_tokens: float,
        *,
        drafters: int | None = None,
        verify_tokens: int | None = None,
        prefill_tokens: int = 0,
    ) -> float:
        """A decode step.

        Args:
            batch: decoding requests. gamma: draft tokens of each that drafts.
            kv_tokens: their context, summed.
            drafters: how many of them draft; None: all.
            verify_tokens: tokens the target verifies, bonus positions included; None: all drafted.
            prefill_tokens: prompt tokens computed in the same forward (mixed steps).
        """
        drafters = batch if drafters is None else drafters
        if gamma == 0 or drafters == 0:
            tokens, seconds = batch, 0.0
        else:
            tokens = batch + drafters * gamma if verify_tokens is None else verify_tokens
            seconds = self.draft_s(drafters, gamma, kv_tokens * drafters / batch)
            seconds += self.set_up.device.speculation_overhead_s
        return seconds + self.verify_s(tokens + prefill_tokens, kv_tokens) + self.set_up.device.step_overhead_s

    def prefill_s(self, tokens: int, kv_tokens: float, draft: bool) -> float:
        """A prefill of `tokens` prompt tokens; `draft`: the draft reads them too."""
        seconds = self._forward(self._target, tokens, kv_tokens) + self.set_up.device.step_overhead_s
        if draft:
            seconds += self._forward(self._draft, tokens, kv_tokens)
        return seconds

    def catchup_s(self, tokens: int, kv_tokens: float) -> float:
        """One draft extend over `tokens` lagging tokens of requests with `kv_tokens` of context together."""
        return self._forward(self._draft, tokens, kv_tokens) if tokens else 0.0

    def relocate_s(self, slots: float) -> float:
        """Moving `slots` live KV slots within the device."""
        return slots * self._relocate_s

    def reload_s(self) -> float:
        """The draft's weights from pinned host memory, every GPU its share over its own link."""
        return self.set_up.draft.weight_bytes / (self.set_up.device.link_bytes_s * self.set_up.tp)

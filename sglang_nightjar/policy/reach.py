"""Which gammas a policy can ask for at which batch size, so that nothing is prepared for the others.

Gamma 0 is always among them, whatever the policy: a step is a plain decode while the draft is away, and where
every request of the batch keeps itself off speculation.
"""

from collections.abc import Mapping, Sequence

from sglang_nightjar.policy.registry import PolicySpec


def gammas_at(spec: PolicySpec, batch_size: int) -> frozenset[int]:
    """What `spec` can ask for with `batch_size` requests running, 0 included.

    `spec.gamma`: the largest it can choose, as the server was started.
    """
    assert batch_size >= 1, f"a batch of {batch_size} requests"
    if spec.fixed:
        return frozenset({0, spec.gamma})
    if spec.name == "tetris":
        from sglang_nightjar.policy.baselines.tetris import TetrisConfig

        config = TetrisConfig()
        return frozenset({0, spec.gamma if batch_size >= config.least_batch else spec.gamma - config.extra})
    if spec.name == "sglang-ema":
        from sglang_nightjar.policy.baselines.sglang_ema import SglangEma

        return frozenset({0, *SglangEma(spec.gamma).candidates(batch_size)})
    return frozenset(range(spec.gamma + 1))


def reachable(spec: PolicySpec, sizes: Sequence[int], most: int) -> Mapping[int, tuple[int, ...]]:
    """The padded batch sizes at which each gamma can be asked for, by gamma; a gamma never asked for is left out.

    Args:
        sizes: to which a batch is padded: to the smallest that holds it.
        most: requests that may run at once. Of batches that no size holds only the gammas are told.
    """
    padded = sorted(sizes)
    found: dict[int, set[int]] = {0: set()}
    for batch in range(1, max(most, *padded, 1) + 1):
        size = next((size for size in padded if size >= batch), None)
        for gamma in gammas_at(spec, batch):
            found.setdefault(gamma, set()).update(() if size is None else (size,))
    return {gamma: tuple(sorted(found[gamma])) for gamma in sorted(found)}

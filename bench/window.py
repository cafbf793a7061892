"""Throughput while requests came: without the end of a run, in which a few long ones run alone."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def window(
    sent_s: Floats, chunks_s: Sequence[Floats], tokens: npt.NDArray[np.int64], clients: int | None
) -> tuple[float, float]:
    """Tokens/s until requests stopped coming, and how many s that was; as `simulate/record.py` has it.

    Args:
        sent_s: of each request, when it was sent, on any clock.
        chunks_s: of each, when the parts of its answer came: the first with one token, the others with equal shares of
            the rest. From first and last alone it could not be told: those still running when requests stop coming
            write their last tokens the faster the emptier the batch is, up to 1.28 times too much in 45 s of 128
            clients.
        tokens: of each one's output.
        clients: of a closed loop, which ends for it when the first of them has nothing more to send; None: the loop
            was open, and ended with the last request sent.
    """
    finish_s = np.array([times[-1] for times in chunks_s])
    stop = sent_s.max() if clients is None else np.sort(finish_s)[max(len(sent_s) - clients, 0)]
    got = 0.0
    for times, count in zip(chunks_s, tokens.tolist(), strict=True):
        if times[0] <= stop:
            got += 1.0 + (count - 1) * float(np.interp(stop, times, np.linspace(0.0, 1.0, len(times))))
    seconds = float(stop - sent_s.min())
    return (got / seconds if seconds > 0 else 0.0), seconds

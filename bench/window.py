"""Throughput while requests came: without the end of a run, in which a few long ones run alone."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def window(
    sent_s: Floats, first_s: Floats, finish_s: Floats, tokens: npt.NDArray[np.int64], clients: int | None
) -> tuple[float, float]:
    """Tokens/s until requests stopped coming, and how many s that was; as `simulate/record.py` has it.

    Args:
        sent_s, first_s, finish_s: of each request, its sending, first and last token, on any clock.
        tokens: of its output; those after the first are taken to have come evenly.
        clients: of a closed loop, which ends for it when the first of them has nothing more to send; None: the loop
            was open, and ended with the last request sent.
    """
    stop = sent_s.max() if clients is None else np.sort(finish_s)[max(len(sent_s) - clients, 0)]
    share = np.clip((stop - first_s) / np.maximum(finish_s - first_s, 1e-9), 0.0, 1.0)
    got = np.where(first_s <= stop, 1.0 + share * (tokens - 1), 0.0)
    seconds = float(stop - sent_s.min())
    return (float(got.sum()) / seconds if seconds > 0 else 0.0), seconds

"""How often an emulated draft agrees with its target: `simulate/acceptance.py`'s model, on a real server.

A request is of a domain, which the last domain tag of its context names, or which is drawn by the domains' weights;
its alpha is drawn from the domain's Beta distribution; time scales it. Whether the draft then gives the
target's token after a context depends on that context alone, so every policy meets the same easy and hard tokens.
"""

from pathlib import Path

import msgspec
import numpy as np

from sglang_nightjar.emulate.context_hash import Hashes, Ints, Marks, another, uniform
from sglang_nightjar.emulate.vocabulary import DOMAINS
from sglang_nightjar.errors import UserError
from sglang_nightjar.simulate.acceptance import AcceptanceSpec, Domain, Floats, log_confidence
from sglang_nightjar.simulate.fields import decode_json, read_bytes

_FLAG = "--nightjar-emulate-acceptance"
_DRAWS = 4096  # of alpha, per domain: as many as 12 of a mark's 24 random bits can name
_LEAST = 1e-6  # probability that a draft may state at least, and at most 1 less this
# Streams of `uniform`; `another` uses 1.
_AGREES, _CONFIDENT, _DOUBTFUL = 2, 3, 4


def read_acceptance(text: str) -> AcceptanceSpec:
    """What `--nightjar-emulate-acceptance` says: nothing, a mean alpha, or a JSON file of `AcceptanceSpec`.

    Raises:
        UserError: the text or the file cannot be read, or asks for what is not emulated.
    """
    if not text:
        return AcceptanceSpec()
    try:
        spec = AcceptanceSpec((msgspec.convert({"alpha": float(text)}, Domain),))
    except msgspec.ValidationError:
        raise UserError(f"{_FLAG} is {text}; choose a value from 0 to 1, or give a JSON file") from None
    except ValueError:
        spec = decode_json(read_bytes(Path(text), "acceptance"), AcceptanceSpec, text)
    times = [point.at_s for point in spec.drift]
    if not 1 <= len(spec.domains) <= len(DOMAINS):
        raise UserError(f"{_FLAG} {text}: field domains has {len(spec.domains)} entries; give 1 to {len(DOMAINS)}")
    if times != sorted(times):
        raise UserError(f"{_FLAG} {text}: field drift must have its points in the order of at_s")
    if spec.position_decay != 1.0:
        raise UserError(f"{_FLAG} {text}: field position_decay is not emulated; leave it out")
    return spec


class Agreement:
    """Answers for the draft. The same `seed` and contexts give the same answers at the same time."""

    def __init__(self, spec: AcceptanceSpec, seed: int = 0) -> None:
        self.spec = spec
        rng = np.random.default_rng([seed, 0xA94EE])
        self._alphas = np.stack([AcceptanceSpec((domain,)).draw(_DRAWS, rng) for domain in spec.domains])
        weights = np.array([domain.weight for domain in spec.domains])
        self._bounds = np.cumsum(weights / weights.sum())[:-1]

    def alpha(self, marks: Marks, now_s: float) -> Floats:
        """Probability that the draft agrees after a context with each mark, at `now_s`; of the shape of `marks`.

        A tag beyond the domains there are counts as none.
        """
        named = (marks >> np.uint32(24)).astype(np.int64) - 1
        drawn = np.searchsorted(self._bounds, ((marks >> np.uint32(12)) & np.uint32(0xFFF)) / 4096.0, side="right")
        domains = np.where((named >= 0) & (named < len(self._alphas)), named, drawn)
        alpha: Floats = self._alphas[domains, marks & np.uint32(0xFFF)]
        return np.minimum(alpha * self.spec.scale(now_s), 1.0)

    def answers(self, hashes: Hashes, marks: Marks, right: Ints, now_s: float) -> tuple[Ints, Floats]:
        """The draft's next token after each context, and the probability the draft states for it.

        Args:
            hashes, marks: of the contexts, as the draft's own KV gives them, [n].
            right: the target's next tokens, if the draft's KV is in order, [n].
            now_s: emulated time, for the drift.
        """
        alpha = self.alpha(marks, now_s)
        agrees = uniform(hashes, _AGREES) < alpha
        stated = np.exp(
            log_confidence(
                alpha,
                agrees,
                np.log1p(-uniform(hashes, _DOUBTFUL)),
                np.log1p(-uniform(hashes, _CONFIDENT)),
                self.spec.calibration,
            )
        )
        return np.where(agrees, right, another(right, hashes)), np.clip(stated, _LEAST, 1.0 - _LEAST)

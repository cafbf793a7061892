"""Whether a batch has the requests it had before, without a look at each of them."""

from typing import Any


class SameBatch:
    """SGLang makes another list of a batch's requests when some join or leave (`ScheduleBatch.merge_batch`,
    `filter_batch`), and changes none in place; where it once should, growing would be noticed too."""

    def __init__(self) -> None:
        self._reqs: Any = None
        self._count = 0

    def forget(self) -> None:
        """The next batch is another one."""
        self._reqs = None

    def __call__(self, batch: Any) -> bool:
        """Whether `batch` has the requests of the last one asked about; it is the last one from now on."""
        same = batch.reqs is self._reqs and len(batch.reqs) == self._count
        self._reqs, self._count = batch.reqs, len(batch.reqs)
        return same

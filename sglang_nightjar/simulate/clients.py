"""Who sends the requests of a run, and when each gets to the server."""

from collections import deque

from sglang_nightjar.simulate.record import Record
from sglang_nightjar.simulate.workload import Work


class Clients:
    """An open loop's arrivals, or a closed loop's clients. Methods return requests, by their index in `work`."""

    def __init__(self, work: Work, longest: int, stop_s: float, record: Record) -> None:
        """
        Args:
            work: a closed loop's `arrival_s` are filled in as requests are sent.
            longest: prompt and output together; longer requests are refused and counted in `record`.
            stop_s: a closed loop sends nothing from then on, and `record` is told when the first client stops.
        """
        self._work, self._longest, self._stop_s, self._record = work, longest, stop_s, record
        self._closed = work.concurrency is not None
        self._arrivals = work.arrival_s.tolist()
        self._sent = 0
        self._on_the_way: deque[tuple[float, int]] = deque()  # of a closed loop: (when it gets there, request)

    def begin(self) -> list[int]:
        """Every client of a closed loop sends its first request, at 0; those that are there at once."""
        return [request for _ in range(self._work.concurrency or 0) for request in self.answered(0.0)]

    def answered(self, now_s: float) -> list[int]:
        """A request has ended: its client sends the next one. Returns that where it gets there at once."""
        while self._closed and self._sent < len(self._arrivals) and now_s < self._stop_s:
            self._work.arrival_s[self._sent] = now_s
            request = self._send()
            if request is None:
                continue
            if not self._work.turnaround_s:
                return [request]
            self._on_the_way.append((now_s + self._work.turnaround_s, request))
            return []
        if self._closed:
            self._record.stop(now_s)
        return []

    def arrived(self, now_s: float) -> list[int]:
        """Everything that has got there by now and was not returned before."""
        found = []
        while self._on_the_way and self._on_the_way[0][0] <= now_s:
            found.append(self._on_the_way.popleft()[1])
        while not self._closed and self._sent < len(self._arrivals) and self._arrivals[self._sent] <= now_s:
            request = self._send()
            if request is not None:
                found.append(request)
        return found

    def next_s(self) -> float | None:
        """When the next one gets there, if nothing ends before; None: none will."""
        if self._on_the_way:
            return self._on_the_way[0][0]
        if not self._closed and self._sent < len(self._arrivals):
            return float(self._arrivals[self._sent])
        return None

    def _send(self) -> int | None:
        """The next request; None: it is longer than the pool and refused."""
        request = self._sent
        self._sent += 1
        if int(self._work.prompt[request] + self._work.output[request]) > self._longest:
            self._record.rejected += 1
            return None
        return request

"""The waiting requests: who enters the pool, and whose prompt is read next."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_nightjar.simulate.protocols import ServerOptions
from sglang_nightjar.simulate.running import Running


@dataclass(slots=True)
class Prompt:
    """A request whose prompt is being read: its tokens, those read, output tokens it had generated before."""

    request: int
    tokens: int
    generated: int
    done: int = 0


class Admission:
    """First come, first served, in chunks of `options.chunk` tokens; one prompt at most is half read.

    Attributes:
        blocked: whether the queue's head did not fit the pool at the last attempt.
    """

    def __init__(self, options: ServerOptions, prompt: npt.NDArray[np.int64], output: npt.NDArray[np.int64]) -> None:
        self._options, self._prompt, self._output = options, prompt, output
        self._queue: deque[tuple[int, int]] = deque()  # (request, output tokens it had generated before)
        self._half_read: Prompt | None = None
        self.blocked = False

    def __len__(self) -> int:
        return len(self._queue)

    def arrive(self, request: int) -> None:
        self._queue.append((request, 0))

    def retract(self, request: int, generated: int) -> None:
        """A running request lost its slots: it goes first again, and its output is part of the prompt to read."""
        self._queue.appendleft((request, generated))

    def drop_half_read(self) -> int:
        """Puts the half-read prompt back into the queue; returns the slots that frees (0: there is none)."""
        part, self._half_read = self._half_read, None
        if part is None:
            return 0
        self.retract(part.request, part.generated)
        return part.tokens

    def next_chunk(self, running: Running, used: int, total: int, per_step: int = 1) -> tuple[list[Prompt], int, int]:
        """Admits what fits and reads the next chunk.

        Args:
            used, total: KV slots. per_step: slots each request must be able to write in a step.

        Returns:
            The prompts completed, the tokens read, and the slots taken by newly admitted requests.
        """
        self.blocked = False
        completed: list[Prompt] = []
        left = self._options.chunk
        taken = 0
        while left > 0 and (self._queue or self._half_read is not None):
            part = self._half_read
            if part is None:
                part = self._admit(running, completed, used + taken, total, per_step)
                if part is None:
                    break
                taken += part.tokens
            read = min(left, part.tokens - part.done)
            part.done += read
            left -= read
            if part.done == part.tokens:
                completed.append(part)
                self._half_read = None
            else:
                self._half_read = part
        return completed, self._options.chunk - left, taken

    def _admit(self, running: Running, starting: list[Prompt], used: int, total: int, per_step: int) -> Prompt | None:
        """The queue's head, if it fits beside the running and `starting` others and what they still need."""
        others = running.count + len(starting)
        if others >= self._options.max_running:
            return None
        request, generated = self._queue[0]
        tokens = int(self._prompt[request]) + generated
        free = total - used
        need = tokens + self._kept_free(request, generated)
        if self._options.reserve_output:
            need += sum(self._kept_free(part.request, part.generated) for part in starting)
        else:
            need += len(starting) * self._options.decode_reserve
        # Also room for everyone's next step; else it would be retracted at once.
        need += (others + 1) * per_step
        if need <= free and running.count:
            need += self._kept_free_for(running)
        # Alone in the pool it needs no more than its prompt and a token.
        if need > free and (used or tokens + 1 > free):
            self.blocked = True
            return None
        self._queue.popleft()
        return Prompt(request, tokens, generated)

    def _kept_free(self, request: int, generated: int) -> int:
        """Output tokens of a request that is about to start."""
        remaining = int(self._output[request]) - generated
        return remaining if self._options.reserve_output else min(self._options.decode_reserve, remaining)

    def _kept_free_for(self, running: Running) -> int:
        if self._options.reserve_output:
            return int(running.remaining.sum())
        return int(np.maximum(self._options.decode_reserve - running.generated, 0).sum())

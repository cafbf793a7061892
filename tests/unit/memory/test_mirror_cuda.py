"""The pinned mirror over a fake driver whose copies are done no earlier than CUDA promises."""

import threading
import time
from collections.abc import Callable

import pytest
import torch
from cuda_world import device_on
from fake_cuda import FakeCuda
from fake_streams import Work

from sglang_nightjar.errors import UserError
from sglang_nightjar.memory.arena import Arena, CommitError
from sglang_nightjar.memory.draft_store import DraftStore
from sglang_nightjar.memory.mirror import MirrorError

CHUNKS = 6


def nothing() -> None:
    pass


class Draft:
    """Weights of three units on a device, and a store of them; a chunk is half a unit."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.device = device_on(cuda)
        self.chunk = self.device.granularity // 2
        self.model = torch.nn.Linear(CHUNKS * self.chunk // 32, 8, bias=False)
        self.before = self.model.weight.detach().clone()
        self.store = DraftStore(self.model, self.device, shared_with=torch.nn.Module())
        self.address = self.model.weight.data_ptr()
        self.begin = len(cuda.calls)

    def whole(self) -> bool:
        return torch.equal(self.model.weight, self.before) and self.model.weight.data_ptr() == self.address

    def made(self, name: str) -> int:
        return self.cuda.calls[self.begin :].count(name)


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_at_most_two_chunks_are_on_their_way(cuda: FakeCuda) -> None:
    draft = Draft(cuda)
    draft.store.release()
    cuda.hold = True
    thread = in_thread(lambda: draft.store.reload(draft.chunk, nothing))
    for done in range(CHUNKS - 1):
        until(lambda done=done: draft.made("cuEventSynchronize") == done + 1)
        assert draft.made("cuMemcpyHtoDAsync") == draft.made("cuEventRecord") == min(done + 2, CHUNKS)
        cuda.complete(1)
    assert thread.is_alive() and draft.made("digest") == 0, "the last chunk has not come"
    cuda.complete()
    thread.join(10)
    assert not thread.is_alive() and draft.whole() and draft.store.resident


def test_nobody_else_is_waited_for(cuda: FakeCuda) -> None:
    draft = Draft(cuda)
    draft.store.release()
    other = draft.device.arena(draft.device.granularity)
    other.commit(0, other.size)
    cuda.use(other.address, other.size)  # a decode step that does not end
    draft.store.reload(draft.chunk, nothing)
    assert draft.whole() and cuda.in_use(other.address, other.size)
    assert draft.made("cuStreamSynchronize") == 0
    cuda.complete()


def test_a_chunk_is_begun_only_when_it_may_be(cuda: FakeCuda) -> None:
    draft = Draft(cuda)
    draft.store.release()
    begun: list[int] = []
    draft.store.reload(draft.chunk, lambda: begun.append(draft.made("cuMemcpyHtoDAsync")))
    assert begun == list(range(CHUNKS))


def test_memory_is_not_taken_away_under_a_copy(cuda: FakeCuda) -> None:
    """The move is called off while chunks are on their way: they are waited for, then the memory goes."""
    draft = Draft(cuda)
    draft.store.release()
    cuda.hold = True
    ended: list[BaseException] = []

    def permit() -> None:
        if draft.made("cuMemcpyHtoDAsync") == 2:
            raise InterruptedError

    def work() -> None:
        try:
            draft.store.reload(draft.chunk, permit)
        except InterruptedError as error:
            ended.append(error)

    thread = in_thread(work)
    until(lambda: draft.made("cuStreamSynchronize") == 1)
    assert draft.store.resident and draft.made("cuMemUnmap") == 3, "only the release before"
    cuda.complete()
    thread.join(10)
    assert len(ended) == 1 and not draft.store.resident and draft.device.pool.spare == 3 * draft.device.granularity
    cuda.hold = False
    draft.store.reload(draft.chunk, nothing)
    assert draft.whole()


def test_a_mirror_that_has_changed_is_noticed_and_the_memory_given_back(cuda: FakeCuda) -> None:
    draft = Draft(cuda)
    draft.store.release()
    (pinned,) = cuda.pinned.values()
    pinned[4096] ^= 1
    with pytest.raises(MirrorError, match="read back as"):
        draft.store.reload(draft.chunk, nothing)
    assert not draft.store.resident
    pinned[4096] ^= 1
    draft.store.reload(draft.chunk, nothing)
    draft.store.verify()
    assert draft.whole() and draft.store.intact() is None


def test_a_reload_refused_at_any_call_gives_the_memory_back(cuda: FakeCuda) -> None:
    draft = Draft(cuda)
    draft.store.release()
    start = len(cuda.calls)
    draft.store.reload(draft.chunk, nothing)
    needed = len(cuda.calls) - start
    draft.store.release()
    spare, named = draft.device.pool.spare, set()
    for after in range(needed):
        cuda.refuse_next(after)
        with pytest.raises((MirrorError, CommitError)) as refusal:
            draft.store.reload(draft.chunk, nothing)
        named.add(cuda.calls[min(cuda.refuse)])
        assert str(refusal.value) and not draft.store.resident and draft.device.pool.spare == spare
        cuda.refuse.clear()
        draft.store.reload(draft.chunk, nothing)
        assert draft.whole()
        draft.store.release()
    assert named == {
        "cuMemMap",
        "cuMemSetAccess",
        "zero",
        "cuMemcpyHtoDAsync",
        "cuEventRecord",
        "cuEventSynchronize",
        "digest",
    }


def test_copies_that_cannot_be_waited_for_keep_the_memory(cuda: FakeCuda) -> None:
    draft = Draft(cuda)
    draft.store.release()
    start = len(cuda.calls)
    maps = 3 + 1 + 1  # then a chunk, whose event fails, and so does waiting for the stream
    cuda.refuse = {start + maps + 1, start + maps + 2}
    with pytest.raises(MirrorError, match="may still run: cuStreamSynchronize"):
        draft.store.reload(draft.chunk, nothing)
    assert draft.store.resident and cuda.in_use(draft.address, 1)
    draft.store.release()
    assert not draft.store.resident and not cuda.in_use(draft.address, 1)


def test_what_was_launched_before_is_in_the_mirror(cuda: FakeCuda) -> None:
    """Loading a model launches work; the mirror is made after it, though on another stream."""
    device = device_on(cuda)
    arena = device.arena(device.granularity)
    arena.commit(0, arena.size)
    contents = arena.tensor(0, (arena.size,), torch.uint8)
    cuda._give(0, Work(lambda: contents.fill_(9), range(arena.address, arena.address + arena.size)))
    mirror = device.mirror(contents)
    contents.fill_(0)
    assert mirror.restore(arena.size, nothing) == mirror.digest()
    assert (contents == 9).all()


def test_a_mirror_that_differs_from_the_device_is_refused(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_on(cuda)
    arena: Arena = device.arena(device.granularity)
    arena.commit(0, arena.size)
    monkeypatch.setattr(cuda, "digest", lambda address, nbytes, unit: torch.ones(1, dtype=torch.uint64))
    with pytest.raises(MirrorError, match=r"on the device and \w+ in their mirror"):
        device.mirror(arena.tensor(0, (arena.size,), torch.uint8))


def test_no_pinned_memory_says_what_to_do(cuda: FakeCuda) -> None:
    device = device_on(cuda)
    arena = device.arena(device.granularity)
    arena.commit(0, arena.size)
    cuda.refuse_next(0)
    with pytest.raises(UserError, match=f"{arena.size} bytes of pinned memory.*cuMemHostAlloc.*ulimit -l"):
        device.mirror(arena.tensor(0, (arena.size,), torch.uint8))

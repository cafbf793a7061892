"""Ranks that agree, over a channel that loses, delays, doubles and reorders messages."""

import os
import random
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from sglang_nightjar.coordination.agent import Agent
from sglang_nightjar.coordination.coordinator import Coordinator, Phase
from sglang_nightjar.coordination.messages import Prepare, Ready, Telemetry, Turn, decode_message, encode_message
from sglang_nightjar.coordination.transport import CurveKeys, ZmqTransport, endpoint_in
from sglang_nightjar.errors import UserError


class FaultyNetwork:
    """Message queues between ranks; each message may be lost, doubled, late or overtaken."""

    def __init__(self, seed: int, loss: float = 0.0, double: float = 0.0, delay: int = 0) -> None:
        self.rng = random.Random(seed)
        self.loss, self.double, self.delay = loss, double, delay
        self.now = 0
        self.queues: dict[int, list[tuple[int, float, bytes]]] = {}

    def post(self, rank: int, data: bytes) -> None:
        if self.rng.random() < self.loss:
            return
        for _ in range(2 if self.rng.random() < self.double else 1):
            due = self.now + self.rng.randint(0, self.delay)
            self.queues.setdefault(rank, []).append((due, self.rng.random(), data))

    def fetch(self, rank: int) -> list[bytes]:
        waiting = self.queues.get(rank, [])
        arrived = sorted(item for item in waiting if item[0] <= self.now)
        self.queues[rank] = [item for item in waiting if item[0] > self.now]
        return [data for _, _, data in arrived]


class End:
    """One rank's transport on a `FaultyNetwork`."""

    def __init__(self, network: FaultyNetwork, rank: int) -> None:
        self.network, self.rank = network, rank

    def send(self, rank: int, data: bytes) -> bool:
        self.network.post(rank, data)
        return True

    def receive(self) -> list[bytes]:
        return self.network.fetch(self.rank)

    def close(self) -> None:
        pass


def run(network: FaultyNetwork, ranks: int, refuse: float, rounds: int, seed: int) -> tuple[Coordinator, list[Agent]]:
    """Transition after transition; checks that a commit happens only where every rank has prepared it."""
    rng = random.Random(seed)
    coordinator = Coordinator(
        End(network, 0), ranks, clock=lambda: float(network.now), timeout_s=12.0, work_timeout_s=12.0
    )

    def can(asked: Prepare) -> str | None:
        return "no room" if rng.random() < refuse else None

    agents = [Agent(End(network, rank), rank, can) for rank in range(1, ranks)]
    for epoch in range(1, rounds + 1):
        coordinator.prepare(Turn.EVICT, epoch, step=network.now)
        for _ in range(40):
            network.now += 1
            coordinator.poll()
            for agent in agents:
                agent.poll()
            if coordinator.phase is not Phase.PREPARING:
                break
        assert coordinator.phase is not Phase.PREPARING, "a transition always ends"
        if coordinator.phase is Phase.AGREED:
            coordinator.begun()
            for agent in agents:  # the lockstep directive: all ranks, same step
                prepared = agent.commit(epoch)
                assert prepared is not None and prepared.epoch == epoch and prepared.turn is Turn.EVICT
                agent.done(epoch, None)
            coordinator.done(0, epoch, None)
            while coordinator.phase is Phase.WORKING:
                network.now += 1
                coordinator.poll()
            coordinator.closed()
            for agent in agents:
                agent.over()
        assert all(agent.prepared is None or agent.prepared.epoch <= epoch for agent in agents)
    return coordinator, agents


def test_quiet_channel_every_transition_is_agreed() -> None:
    coordinator, _ = run(FaultyNetwork(1), ranks=4, refuse=0.0, rounds=50, seed=1)
    events = coordinator.events
    assert (events.agreed, events.aborted, events.stale, events.repeated) == (50, 0, 0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_faulty_channel_never_commits_what_a_rank_has_not_prepared(seed: int) -> None:
    network = FaultyNetwork(seed, loss=0.1, double=0.3, delay=6)
    coordinator, _ = run(network, ranks=3, refuse=0.1, rounds=60, seed=seed)
    events = coordinator.events
    assert events.agreed + events.aborted == 60 and events.aborted + events.failed >= events.timed_out
    assert events.agreed > 10 and events.timed_out > 0 and events.refused > 0
    assert events.stale + events.repeated > 0, "late and doubled answers are counted"


def test_refusal_aborts_everywhere() -> None:
    network = FaultyNetwork(0)
    coordinator = Coordinator(End(network, 0), 3, clock=lambda: 0.0)
    willing = Agent(End(network, 1), 1, lambda asked: None)
    unwilling = Agent(End(network, 2), 2, lambda asked: "pool too small")
    coordinator.prepare(Turn.EVICT, 1, step=7)
    for part in (willing, unwilling, coordinator, willing):
        part.poll()
    assert coordinator.phase is Phase.IDLE and coordinator.events.refused == 1
    assert willing.prepared is None and unwilling.prepared is None


def test_a_single_rank_agrees_with_itself() -> None:
    coordinator = Coordinator(End(FaultyNetwork(0), 0), 1, clock=lambda: 0.0)
    coordinator.prepare(Turn.EVICT, 1, step=1)
    assert coordinator.phase is Phase.AGREED
    coordinator.begun()
    coordinator.done(0, 1, None)
    assert coordinator.phase is Phase.ENDED
    coordinator.closed()
    coordinator.prepare(Turn.RELOAD, 2, step=2, refusal="the mirror is gone")
    assert coordinator.phase is Phase.IDLE and coordinator.events.aborted == 1


def test_a_rank_that_followed_other_directives_is_noticed() -> None:
    network = FaultyNetwork(0)
    coordinator = Coordinator(End(network, 0), 2, clock=lambda: 3.0)
    agent = Agent(End(network, 1), 1, lambda asked: None)
    coordinator.note(64, digest=111)
    agent.tell(0, 64, digest=111)
    coordinator.poll()
    assert coordinator.events.disagreements == 0 and coordinator.last_seen == {1: (64, 3.0)}
    agent.tell(0, 64, digest=112)
    coordinator.poll()
    assert coordinator.events.disagreements == 1


def test_garbage_is_counted_and_ignored() -> None:
    network = FaultyNetwork(0)
    coordinator = Coordinator(End(network, 0), 2, clock=lambda: 0.0)
    agent = Agent(End(network, 1), 1, lambda asked: None)
    for data in (b"", b"\xff\xff", msgspec.msgpack.encode({"rank": 1}), encode_message(Prepare(1, 1, Turn.EVICT))):
        network.post(0, data)
    network.post(0, encode_message(Ready(1, 9, 1)))
    coordinator.poll()
    assert coordinator.events.malformed == 4 and coordinator.events.stale == 1
    network.post(1, b"\x00garbage")
    network.post(1, encode_message(Telemetry(0, 0, 0, 0)))
    agent.poll()
    assert agent.strange == 2
    with pytest.raises(msgspec.DecodeError):
        decode_message(b"\x00")


def eventually(ready: list[bytes], transport: ZmqTransport) -> list[bytes]:
    for _ in range(200):
        ready += transport.receive()
        if ready:
            return ready
        time.sleep(0.01)
    raise AssertionError("nothing arrived in 2 s")


def exchange(first: ZmqTransport, second: ZmqTransport) -> None:
    second.send(0, b"hello")
    assert eventually([], first) == [b"hello"]
    assert first.send(1, b"answer")
    assert eventually([], second) == [b"answer"]
    assert not first.send(7, b"nobody"), "an unknown rank is an unsent message, not a wait"


def test_zmq_over_a_private_folder(tmp_path: Path) -> None:
    endpoint = endpoint_in(tmp_path / "run")
    first, second = ZmqTransport(endpoint, 0), ZmqTransport(endpoint, 1)
    try:
        exchange(first, second)
    finally:
        first.close()
        second.close()


@pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq has no CURVE")
def test_zmq_over_tcp_needs_keys() -> None:
    with pytest.raises(UserError, match="give CURVE keys"):
        ZmqTransport("tcp://127.0.0.1:*", 0)
    server, client = zmq.curve_keypair(), zmq.curve_keypair()
    first = ZmqTransport("tcp://127.0.0.1:*", 0, CurveKeys(server, client))
    second = ZmqTransport(first.endpoint, 1, CurveKeys(server, client))
    try:
        exchange(first, second)
    finally:
        first.close()
        second.close()


def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    with pytest.raises(UserError, match="mode 755"):
        endpoint_in(tmp_path)

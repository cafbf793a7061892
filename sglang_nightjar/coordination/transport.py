"""Bytes between rank 0 and the other ranks, over ZMQ, never blocking.

Nothing that must happen at the same step everywhere depends on it: a message may be late, lost or
doubled. By default a unix socket in a private folder (mode 0700). Several hosts use tcp, and then
only with CURVE keys: an open ZMQ port is a way in.
"""

import atexit
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any, Protocol

import zmq

from sglang_nightjar.errors import UserError

_QUEUED = 1000  # messages kept for a peer that does not read; later ones are dropped and counted


_RUN_FOLDER = "SGLANG_NIGHTJAR_RUN"  # environment: where the ranks of this server meet


def make_run_folder() -> None:
    """The launcher's part: a private folder for this server, named to its children, removed at exit."""
    if _RUN_FOLDER not in os.environ:
        folder = tempfile.mkdtemp(prefix="nightjar-")  # mode 0700
        os.environ[_RUN_FOLDER] = folder
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def run_folder() -> Path:
    """The folder of the server this process belongs to."""
    assert _RUN_FOLDER in os.environ, "the launcher names the folder before it starts ranks"
    return Path(os.environ[_RUN_FOLDER])


class Transport(Protocol):
    """What coordinator and agents need."""

    def send(self, rank: int, data: bytes) -> bool:
        """Sends to `rank`, without waiting; False where it could not be queued."""
        ...

    def receive(self) -> list[bytes]:
        """Everything that has arrived."""
        ...

    def close(self) -> None: ...


class NoTransport:
    """Of a server with one rank: there is nobody to talk to."""

    def send(self, rank: int, data: bytes) -> bool:
        return False

    def receive(self) -> list[bytes]:
        return []

    def close(self) -> None:
        pass


class CurveKeys:
    """Keys of one server: `server` and `client` pairs as (public, secret), 40 bytes of Z85 each."""

    def __init__(self, server: tuple[bytes, bytes], client: tuple[bytes, bytes]) -> None:
        self.server, self.client = server, client


def endpoint_in(folder: Path) -> str:
    """The endpoint in a private folder, which is made if it is missing; `UserError` where others may enter it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o077 or folder.stat().st_uid != os.getuid():
        raise UserError(f"{folder} is open to others (mode {mode:o}); give it mode 0700, or name another folder")
    return f"ipc://{folder}/ranks"


class ZmqTransport:
    """Rank 0 binds and talks to all; every other rank connects and talks to rank 0."""

    def __init__(self, endpoint: str, rank: int, keys: CurveKeys | None = None) -> None:
        """Raises `UserError` for an open tcp endpoint without keys."""
        if not endpoint.startswith(("ipc://", "inproc://")) and keys is None:
            raise UserError(f"{endpoint} can be reached by others; give CURVE keys, or use a private folder")
        self._rank = rank
        self._socket: Any = zmq.Context.instance().socket(zmq.ROUTER if rank == 0 else zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUED)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED)
        if keys is not None:
            public, secret = keys.server if rank == 0 else keys.client
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            if rank == 0:
                self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            else:
                self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server[0])
        if rank == 0:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.bind(endpoint)
        else:
            self._socket.setsockopt(zmq.IDENTITY, _identity(rank))
            self._socket.connect(endpoint)

    @property
    def endpoint(self) -> str:
        """As bound, with the port where the system chose one."""
        bound: bytes = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        return bound.decode()

    def send(self, rank: int, data: bytes) -> bool:
        parts = [_identity(rank), data] if self._rank == 0 else [data]
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError:  # not connected yet, gone, or its queue is full
            return False
        return True

    def receive(self) -> list[bytes]:
        arrived: list[bytes] = []
        while True:
            try:
                arrived.append(self._socket.recv_multipart(zmq.NOBLOCK)[-1])
            except zmq.ZMQError:
                return arrived

    def close(self) -> None:
        self._socket.close()


def _identity(rank: int) -> bytes:
    return b"rank%d" % rank

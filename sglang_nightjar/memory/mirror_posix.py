"""The mirror of the CPU platform: an unlinked file, whose pages are not this process's memory."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from sglang_nightjar.memory.mirror import MirrorError


class FileMirror:
    """`Mirror` in a file without a name; checksums are BLAKE2b.

    Args:
        contents: uint8 [n] in host memory; the file holds what it holds now.
        folder: on disk, where the file is; None: where the system keeps temporary files.

    Attributes:
        file: open for reading and writing.
    """

    def __init__(self, contents: torch.Tensor, folder: Path | None) -> None:
        self.copied = 0
        self._contents = memoryview(contents.numpy())
        self.file = tempfile.TemporaryFile(prefix="nightjar-draft-", dir=folder)  # noqa: SIM115  # kept open
        self.file.write(self._contents)
        self.file.flush()

    def restore(self, chunk_bytes: int, before_chunk: Callable[[], None]) -> str:
        digest = hashlib.blake2b()
        for start in range(0, len(self._contents), chunk_bytes):
            before_chunk()
            chunk = self._contents[start : start + chunk_bytes]
            self._read(chunk, start)
            digest.update(chunk)
        return digest.hexdigest()

    def settle(self) -> None:
        """Nothing runs by itself here."""

    def digest(self) -> str:
        return hashlib.blake2b(self._contents).hexdigest()

    def intact(self) -> str | None:
        size = os.fstat(self.file.fileno()).st_size
        expected = len(self._contents)
        return None if size == expected else f"the mirror of the draft has {size} bytes, not {expected}"

    def _read(self, chunk: memoryview, start: int) -> None:
        done = 0
        while done < len(chunk):
            count = os.preadv(self.file.fileno(), [chunk[done:]], start + done)
            if count == 0:
                raise MirrorError(f"the mirror of the draft ends at {start + done} of {len(self._contents)} bytes")
            done += count
            self.copied += count

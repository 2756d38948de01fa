"""Named sets of digests that eviction must never touch, each a file of the chunk folder, so that it survives kill -9.

A digest is added to a hold before one looks whether its chunk is there. Both adding and evicting happen under the
folder's lock: the other way round, another process evicts the chunk between the look and the hold.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress

from holdfast_client.local.private_folder import PrivateFolder, open_file
from holdfast_protocol.digests import DIGEST_PATTERN

FOLDER = "holds"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z")
_DIGEST = re.compile(DIGEST_PATTERN)


class Hold:
    """One of them; `ChunkFolder.hold` gives it. It lasts until `release`, by whichever process."""

    def __init__(self, folder: PrivateFolder, locked: Callable[[], AbstractContextManager[object]], name: str) -> None:
        if not _NAME.match(name):
            raise ValueError(f"{name!r} is no name for a hold")
        self._folder = folder
        self._locked = locked
        self.name = name

    def add(self, digests: Iterable[str], *, durable: bool = False) -> None:
        """Held when this returns; `durable`: also after a loss of power. Adding a digest twice is fine. Raises
        OSError."""
        lines = "".join(f"{digest}\n" for digest in digests)
        with self._locked(), self._folder.subfolder(FOLDER, make=True) as folder:
            descriptor = open_file(self.name, os.O_RDWR | os.O_CREAT, folder)
            try:
                size = os.fstat(descriptor).st_size
                # What was written last may be torn, by a disk that was full. It must not spoil the next line.
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                left = memoryview((("\n" if torn else "") + lines).encode("ascii"))
                while left:
                    written = os.pwrite(descriptor, left, size)
                    left, size = left[written:], size + written
                if durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if durable:
                os.fsync(folder)
                os.fsync(self._folder.descriptor)

    def digests(self) -> set[str]:
        """What it holds; nothing if it was never added to, or was released."""
        try:
            with self._folder.subfolder(FOLDER) as folder:
                return _read(folder, self.name)
        except FileNotFoundError:
            return set()

    def release(self) -> None:
        """From now on its chunks may be evicted, unless another hold has them. Twice is fine."""
        with self._locked(), suppress(FileNotFoundError), self._folder.subfolder(FOLDER) as folder:
            os.unlink(self.name, dir_fd=folder)


def hold_names(root: PrivateFolder) -> list[str]:
    try:
        with root.subfolder(FOLDER) as folder:
            return sorted(name for name in os.listdir(folder) if _NAME.match(name))
    except FileNotFoundError:
        return []


def held_digests(root: PrivateFolder) -> set[str]:
    """Of all holds together, under the folder's lock. Raises OSError: a hold that cannot be read must stop eviction."""
    try:
        with root.subfolder(FOLDER) as folder:
            return set().union(*(_read(folder, name) for name in os.listdir(folder)))
    except FileNotFoundError:
        return set()


def _read(folder: int, name: str) -> set[str]:
    with open(open_file(name, os.O_RDONLY, folder), encoding="ascii", errors="replace") as file:
        return {line for line in file.read().splitlines() if _DIGEST.match(line)}

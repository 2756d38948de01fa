"""Chunks as plain files, where this machine sees the store's own filesystem (protocol rule 18). No HTTP.

Writing ends in the store's `incoming` folder; the service publishes from there. Reading is checked like any other.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast_client.chunks.core_limit import CoreLimit
from holdfast_client.chunks.pace import Pace
from holdfast_client.chunks.receive import Receiver
from holdfast_client.chunks.stopping import check_stop
from holdfast_client.errors import ChunkCorrupt, DirectFileRefused, StoreFull, StoreUnavailable

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR}
_WRITE_BYTES = 64 * 1024 * 1024
"""A whole chunk as a rule: after each write this thread wants the interpreter's lock back, and training waits while it
gets it."""


@contextmanager
def _file_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "unknown")
        if error.errno in _FULL:
            raise StoreFull(f"The store's filesystem has no room left ({name})") from None
        if error.errno in _REFUSED:
            raise DirectFileRefused(f"The store's filesystem cannot be {what} from here ({name})") from None
        raise StoreUnavailable(f"The store's filesystem failed ({name})") from None


def write_incoming(
    path: str, body: memoryview, pace: Pace, cores: CoreLimit, stop: threading.Event | None = None
) -> None:
    """Writes the whole file and closes it, so that the service sees it, or leaves none. It need not last: the service
    makes its own copy durable. The name is the ticket's own, so a file that is there already is what an earlier try
    left; it is removed and never written into. Raises StoreFull, DirectFileRefused, StoreUnavailable,
    TransferStopped."""
    with _file_errors("written"):
        descriptor = _created(path)
        try:
            written, block_bytes = 0, pace.slice_bytes(_WRITE_BYTES)
            while written < body.nbytes:
                check_stop(stop)
                block = body[written : written + block_bytes]
                pace.spend(block.nbytes, stop)
                written += cores.run(functools.partial(os.write, descriptor, block))
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(descriptor)


def _created(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        with suppress(FileNotFoundError):
            os.unlink(path)
        descriptor = os.open(path, flags, 0o600)
    try:
        _let_the_service_read(descriptor, os.stat(os.path.dirname(path)))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _let_the_service_read(descriptor: int, incoming: os.stat_result) -> None:
    """Whoever the store is open to: a group may share it, and root may train for a service that is not root."""
    if incoming.st_mode & stat.S_IWGRP:
        os.fchmod(descriptor, 0o640)
    elif os.geteuid() == 0 != incoming.st_uid:
        os.fchown(descriptor, incoming.st_uid, incoming.st_gid)


def read_file(path: str, receiver: Receiver, digest: str, stop: threading.Event | None = None) -> None:
    """Reads a chunk's file. Raises ChunkCorrupt, also if the file is not there; DirectFileRefused; StoreUnavailable."""
    with _file_errors("read"):
        try:
            file = Path(path).open("rb", buffering=0)  # noqa: SIM115  (closed by the next `with`)
        except FileNotFoundError:
            raise ChunkCorrupt(digest, "missing", "its file is not there") from None
        with file:
            receiver.expect(os.fstat(file.fileno()).st_size)
            receiver.fill(file.readinto, stop)

"""Chunks as plain files, if this machine proves that it sees the store's own filesystem (rule drop-box). No HTTP.

Writing ends in the store's `incoming` folder; the service publishes from there. Reading is checked like any other. The
service says which file, so the client looks whether it lies in the mount that was proven: else a service that has been
taken over could have each trainer overwrite files of its own.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from holdfast_client.chunks.connections import RateLimit
from holdfast_client.chunks.workers import CoreLimit
from holdfast_client.errors import (
    ChunkCorrupt,
    DirectFileRefused,
    Forbidden,
    RouteNotFound,
    StoreFull,
    StoreUnavailable,
)
from holdfast_client.transport import check_stop
from holdfast_protocol.checkpoints import MountProof, MountProofOffer

if TYPE_CHECKING:
    from holdfast_client.chunks.download import Receiver


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR}
_WRITE_BYTES = 64 * 1024 * 1024
"""Usually a whole chunk: after each write this thread needs the interpreter's lock, and training waits while it takes
it."""


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
    path: str, body: memoryview, rate_limit: RateLimit, cores: CoreLimit, stop: threading.Event | None = None
) -> None:
    """Writes and closes the whole file, so that the service sees it, or leaves none. It need not be durable, because
    the service makes its own copy durable. The name is the ticket's own, so an existing file is from an earlier try; it
    is removed and never written into. Raises StoreFull, DirectFileRefused, StoreUnavailable, TransferStopped."""
    with _file_errors("written"):
        descriptor = _created(path)
        try:
            written, block_bytes = 0, rate_limit.slice_bytes(_WRITE_BYTES)
            while written < body.nbytes:
                check_stop(stop)
                block = body[written : written + block_bytes]
                rate_limit.acquire(block.nbytes, stop)
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
    """Gives the file the readers of the store's folder: a group may share it, and root may train for another user's
    service."""
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


_CONTENT = re.compile(r"[0-9a-f]{64}")
_TICKET_ID = re.compile(r"[0-9a-zA-Z][0-9a-zA-Z-]{7,63}")
_RENEW_AT = 0.7
"""Part of a proof's life after which a new one is asked for, so that none expires on its way."""


_ASK_AGAIN_SECONDS = 30.0
"""The pause before the next try, after a mounted store did not answer the service."""


class MountAccess:
    """Proves that this machine sees the store's own filesystem, so that the service hands out paths instead of URLs.
    The proof is the content of a file that the service has just written. If that fails, all transfers silently use
    HTTP: a mount is a short cut and never a need. One per client, shared by all transfers. Thread-safe."""

    def __init__(self, offer: Callable[[], MountProofOffer], *, enabled: bool) -> None:
        self._offer = offer
        self._usable = enabled
        self._proof: MountProof | None = None
        self._others: list[MountProof] = []
        self._root: PurePath | None = None
        self._other_roots: list[PurePath] = []
        self._renew_at = float("-inf")
        self._lock = threading.Lock()

    def proof(self) -> MountProof | None:
        """The proof to send along, or None without a mount of the store that is written to. Raises HoldfastError if the
        service is unavailable."""
        with self._lock:
            self._renew()
            return self._proof

    def new_file(self) -> str | None:
        """A file in the mount that is written to, as a ticket would name one; None without a mount. Raises as `proof`
        does."""
        if self.proof() is None or self._root is None:
            return None
        return str(self._root / "incoming" / uuid.uuid4().hex)

    def other_proofs(self) -> list[MountProof]:
        """Proofs for the mounts of further stores, for reading. Raises as `proof` does."""
        with self._lock:
            self._renew()
            return list(self._others)

    def check_write(self, path: str) -> None:
        """Raises DirectFileRefused for any file but one of `incoming` in the mount that is written to, and for all once
        it was given up."""
        self._refuse_given_up()
        file = PurePath(path)
        if self._root is None or file.parent != self._root / "incoming" or not _TICKET_ID.fullmatch(file.name):
            raise DirectFileRefused("The service names a file to write that is not in the store's own folder")

    def check_read(self, path: str) -> None:
        """Raises DirectFileRefused for a file outside of the mounts that were proven, and for all once they were given
        up."""
        self._refuse_given_up()
        file = PurePath(path)
        roots = [*self._other_roots, *([] if self._root is None else [self._root])]
        if ".." in file.parts or not any(file.is_relative_to(root) for root in roots):
            raise DirectFileRefused("The service names a file to read that is not in a store's own folder")

    def give_up(self) -> None:
        """Reading or writing there was refused or fails: use HTTP from now on."""
        with self._lock:
            self._usable, self._proof, self._others = False, None, []

    def _refuse_given_up(self) -> None:
        """For tickets from before."""
        if not self._usable:
            raise DirectFileRefused("The store's own folder is not used from here any more")

    def _renew(self) -> None:
        if not self._usable or time.monotonic() < self._renew_at:
            return
        asked_at = time.monotonic()
        try:
            offer = self._offer()
        except (Forbidden, RouteNotFound):
            offer = _NOTHING
        self._proof = _prove(offer)
        if self._proof is not None:
            self._root = _root_of(offer)
        proven = [(other, proof) for other in offer.others if (proof := _prove(other)) is not None]
        self._others = [proof for _, proof in proven]
        self._other_roots = [root for other, _ in proven if (root := _root_of(other)) is not None] or self._other_roots
        self._usable = self._proof is not None or bool(self._others) or offer.unavailable
        life_seconds = offer.expires_in_seconds * _RENEW_AT
        self._renew_at = asked_at + (min(life_seconds, _ASK_AGAIN_SECONDS) if offer.unavailable else life_seconds)


_NOTHING = MountProofOffer(proof_id=None, path=None, expires_in_seconds=0)


def _root_of(offer: MountProofOffer) -> PurePath | None:
    """The store's folder, of which the offer names the file `proofs/<proof id>`; None: it names another one."""
    if offer.proof_id is None or offer.path is None:
        return None
    file = PurePath(offer.path)
    named = file.is_absolute() and ".." not in file.parts and file.parts[-2:] == ("proofs", offer.proof_id)
    return file.parent.parent if named else None


def _prove(offer: MountProofOffer) -> MountProof | None:
    if offer.proof_id is None or offer.path is None or _root_of(offer) is None:
        return None
    try:
        with open(offer.path, encoding="ascii") as file:
            content = file.read(65).strip()
    except (OSError, ValueError):
        return None
    return MountProof(proof_id=offer.proof_id, content=content) if _CONTENT.fullmatch(content) else None

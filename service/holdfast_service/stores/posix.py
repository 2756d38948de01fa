"""Chunks in a folder: the embedded default; also EFS, FSx for Lustre, Filestore, Parallelstore and NFS.

    <root>/<project id>/chunks/<2 hex>/<digest>/<generation>           the object
    <root>/<project id>/chunks/<2 hex>/<digest>/<generation>.sha256    only if the service hashed it while writing
    <root>/incoming/<ticket id>                                        what clients with the mount write
    <root>/proofs/<proof id>                                           see mount_proof.py

Every object begins in `incoming/` and is published by link(): whole or not at all, never over another. A client with
the mount hands its file over (`publish`); any other sends it through endpoints.py (`stage`, `publish_staged`). Only
in the second case has the service seen the bytes, and says so by the `.sha256` file, made after the object's name:
a crash between the two leaves an object that is unproven, which is safe. Clients cannot write beside the objects, so
they cannot claim a proof; the hash is of the stored bytes, which need not be the chunk's digest.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

from holdfast_service.stores import mount_proof
from holdfast_service.stores.base import (
    CHUNKS,
    Capabilities,
    GetTicket,
    ObjectFacts,
    ObjectKey,
    ObjectMismatch,
    PutTicket,
    StoredObject,
    StoreRefused,
    validated_name,
    validated_project_id,
)
from holdfast_service.stores.posix_files import (
    INCOMING,
    StagedFile,
    fsync_folder,
    link_new,
    make_folder,
    remove_whatever,
    store_errors,
)
from holdfast_service.stores.posix_probe import probe_posix
from holdfast_service.stores.signed_urls import Grant, UrlSigner

_PROOF_SUFFIX = ".sha256"
_READ_BYTES = 1024 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TICKET_ID = re.compile(r"[0-9a-zA-Z][0-9a-zA-Z-]{7,63}")


class PosixStore:
    """A Store and a MountedStore. `root` is the folder's path as the service sees it."""

    kind = "posix"

    def __init__(self, root: Path, signer: UrlSigner, *, capabilities: Capabilities | None = None) -> None:
        self.root = root
        self.capabilities = capabilities
        self._signer = signer
        self._guard: Callable[[], None] = lambda: None

    def prepare(self) -> None:
        """Makes the folders. Not done at every start: where a mount is absent it would make a second, empty store."""
        with store_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            for part in (INCOMING, mount_proof.PROOFS):
                make_folder(self.root / part)

    # Tickets for clients without the mount.

    def presign_put(
        self, key: ObjectKey, *, stored_bytes: int, stored_sha256: str, md5: str | None = None, expires_in_seconds: int
    ) -> PutTicket:
        grant = Grant("PUT", key, stored_bytes, stored_sha256)
        url = self._signer.sign(grant, expires_in_seconds=expires_in_seconds)
        return PutTicket("PUT", url, {"content-length": str(stored_bytes)}, expires_in_seconds)

    def presign_get(self, key: ObjectKey, *, expires_in_seconds: int) -> GetTicket:
        url = self._signer.sign(Grant("GET", key, None, None), expires_in_seconds=expires_in_seconds)
        return GetTicket(url, {}, expires_in_seconds)

    def stage(self) -> StagedFile:
        """A file to stream a body into. Use it as a context manager."""
        return StagedFile(self.root)

    def publish_staged(self, staged: StagedFile, key: ObjectKey) -> ObjectFacts:
        """Makes what the service wrote and hashed the object. One that is there already stays as it is."""
        staged.sync()
        path = self.object_path(key)
        with store_errors(self.root):
            if link_new(staged.path, path):
                with suppress(FileExistsError), _proof_path(path).open("x") as proof:
                    proof.write(staged.sha256)
                fsync_folder(path.parent)
        return self.head(key)

    # Hand-over by clients with the mount.

    def new_mount_proof(self, *, expires_in_seconds: int) -> tuple[str, Path]:
        return mount_proof.new_mount_proof(self.root, expires_in_seconds)

    def check_mount_proof(self, proof_id: str, content: str) -> bool:
        return mount_proof.check_mount_proof(self.root, proof_id, content)

    def incoming_path(self, ticket_id: str) -> Path:
        if not _TICKET_ID.fullmatch(ticket_id):
            raise ValueError("a ticket id is 8 to 64 letters, digits and hyphens")
        return self.root / INCOMING / ticket_id

    def publish(self, ticket_id: str, key: ObjectKey, expected_bytes: int) -> None:
        source, path = self.incoming_path(ticket_id), self.object_path(key)
        with store_errors(self.root):
            try:
                # Neither a symbolic link out of the store nor a pipe that nobody writes to may be followed.
                descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                if os.stat(path).st_size == expected_bytes:
                    return
                raise ObjectMismatch("the object under this key has another size") from None
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                remove_whatever(source)
                raise ObjectMismatch("a symbolic link was handed over instead of a file") from None
            try:
                self._publish_open_file(descriptor, source, path, expected_bytes)
            finally:
                os.close(descriptor)

    def _publish_open_file(self, descriptor: int, source: Path, path: Path, expected_bytes: int) -> None:
        handed_over = os.fstat(descriptor)
        if not stat.S_ISREG(handed_over.st_mode) or handed_over.st_size != expected_bytes:
            remove_whatever(source)
            raise ObjectMismatch(f"the file handed over has {handed_over.st_size} bytes, announced {expected_bytes}")
        os.fsync(descriptor)  # the client's own fsync is only its word
        linked = link_new(source, path)
        if linked and not os.path.samestat(handed_over, os.lstat(path)):
            path.unlink()
            raise ObjectMismatch("the file was exchanged while it was handed over")
        source.unlink(missing_ok=True)
        if os.stat(path).st_size != expected_bytes:
            raise ObjectMismatch("the object under this key has another size")

    def object_path(self, key: ObjectKey) -> Path:
        return self.root / key.path

    def sweep_incoming(self, *, older_than_seconds: float) -> int:
        self._guard()
        removed = mount_proof.sweep_mount_proofs(self.root)
        oldest = self._filesystem_now() - older_than_seconds
        with store_errors(self.root), os.scandir(self.root / INCOMING) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        remove_whatever(Path(entry.path))
                        removed += 1
        return removed

    def _filesystem_now(self) -> float:
        """The file server's clock, which dated the files; ours may be off."""
        with self.stage() as staged:
            return os.stat(staged.path).st_mtime

    # What the service itself reads and writes.

    def head(self, key: ObjectKey) -> ObjectFacts:
        path = self.object_path(key)
        with store_errors(self.root):
            size = os.stat(path).st_size
            try:
                claimed = _proof_path(path).read_text(errors="replace")
            except FileNotFoundError:
                claimed = ""
        return ObjectFacts(size, claimed if _SHA256.fullmatch(claimed) else None, None)

    def open_read(self, key: ObjectKey) -> Iterator[bytes]:
        with store_errors(self.root):
            file = self.object_path(key).open("rb", buffering=0)
        return self._pieces(file)

    def _pieces(self, file: FileIO) -> Iterator[bytes]:
        with file, store_errors(self.root):
            while piece := file.read(_READ_BYTES):
                yield piece

    def put_bytes(self, key: ObjectKey, data: bytes, *, storage_class: str | None = None) -> ObjectFacts:
        if storage_class is not None:
            raise StoreRefused(f"a filesystem has no storage class {storage_class}; name a second folder instead")
        self._guard()
        with self.stage() as staged:
            staged.write(data)
            return self.publish_staged(staged, key)

    def delete(self, key: ObjectKey, version_id: str | None = None) -> None:
        self._guard()
        path = self.object_path(key)
        with store_errors(self.root):
            for name in (_proof_path(path), path):
                with suppress(FileNotFoundError):
                    name.unlink()
        with suppress(OSError):  # other generations may live here, or another delete was faster
            path.parent.rmdir()
        self.ping()  # that nothing was found proves nothing where the mount is absent

    def list_objects(self, project_id: str) -> Iterator[StoredObject]:
        with store_errors(self.root):
            for fan_out in _entries(self.root / validated_project_id(project_id) / CHUNKS):
                for digest_folder in _entries(fan_out):
                    for path in _entries(digest_folder):
                        yield from self._described(path)
        self.ping()  # folders that vanished on the way were deleted only if the store is still there

    def _described(self, path: Path) -> Iterator[StoredObject]:
        """Nothing for proofs, for files that a network filesystem keeps for itself, and for what was just deleted."""
        with suppress(ValueError, FileNotFoundError):
            key = ObjectKey.from_path(path.relative_to(self.root).as_posix())
            facts = os.stat(path)
            yield StoredObject(key, facts.st_size, datetime.fromtimestamp(facts.st_mtime, UTC))

    def write_named(self, name: str, data: bytes) -> None:
        self._guard()
        path = self.root / validated_name(name)
        with self.stage() as staged:
            staged.write(data)
            staged.sync()
            with store_errors(self.root):
                make_folder(path.parent)
                os.replace(staged.path, path)
                fsync_folder(path.parent)

    def read_named(self, name: str) -> bytes:
        with store_errors(self.root):
            return (self.root / validated_name(name)).read_bytes()

    def delete_named(self, name: str) -> None:
        self._guard()
        path = self.root / validated_name(name)
        with store_errors(self.root), suppress(FileNotFoundError):
            path.unlink()
        with suppress(OSError):  # what else is in the folder stays
            path.parent.rmdir()
        self.ping()

    def list_named(self, folder: str) -> Iterator[str]:
        waiting = [self.root / validated_name(folder)]
        with store_errors(self.root):
            while waiting:
                for path in _entries(waiting.pop()):
                    if path.is_dir():
                        waiting.append(path)
                    else:
                        yield path.relative_to(self.root).as_posix()
        self.ping()  # as in list_objects

    def guard_changes(self, guard: Callable[[], None]) -> None:
        self._guard = guard

    def probe(self) -> Capabilities:
        self.prepare()
        self.capabilities = probe_posix(self)
        return self.capabilities

    def clock(self) -> datetime:
        return datetime.fromtimestamp(self._filesystem_now(), UTC)

    def ping(self) -> None:
        with store_errors(self.root):
            if not os.access(self.root / INCOMING, os.R_OK | os.W_OK | os.X_OK):
                os.stat(self.root / INCOMING)
                raise PermissionError(errno.EACCES, "not writable")

    def close(self) -> None:
        """Nothing is kept open."""


def _proof_path(path: Path) -> Path:
    return path.with_name(path.name + _PROOF_SUFFIX)


def _entries(folder: Path) -> list[Path]:
    """What is in it; nothing if a delete removed it meanwhile."""
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []

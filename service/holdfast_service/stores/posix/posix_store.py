"""Chunks in a folder: the embedded default; also NFS, EFS, Filestore and Lustre (docs/operating/mounts.md).

    <root>/<project id>/chunks/<2 hex>/<digest>/<generation>           the object
    <root>/<project id>/chunks/<2 hex>/<digest>/<generation>.sha256    only if the service hashed it while writing
    <root>/incoming/<ticket id>                                        what clients with the mount write
    <root>/proofs/<proof id>                                           who sees the same mount, see files.py

Every object is a file that was in `incoming/` and is published by link(): whole or not at all, never over another. A
client with the mount leaves a file there (`publish`). The service makes that file the object if it can exclude every
other writer (files.py), and copies it if not: a client that has it open must not be able to change the object. Any
other client sends the bytes through endpoints.py (`stage`, `publish_staged`). In all cases the service has hashed the
object's bytes, and says so by the `.sha256` file, made after the object's name is durable: a crash between the two
leaves an object that is unproven, which is safe, and whose name the next `publish` makes durable. Clients cannot write
beside the objects, so they cannot claim a proof; the hash is of the stored bytes, which need not be the chunk's digest.

Nothing in the store is reached by a symbolic link, and everything in it is for the service's user alone, or for one
group (rule no-symlinks); see files.py.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from urllib.parse import unquote, urlsplit

from holdfast_service.stores.base import (
    CHUNKS,
    MOST_NAMED_BYTES,
    Capabilities,
    GetTicket,
    ObjectFacts,
    ObjectKey,
    ObjectMismatch,
    ObjectMissing,
    ObjectTooLarge,
    Opening,
    PutTicket,
    Store,
    StoredObject,
    StoreRefused,
    StoreUnavailable,
    StoreUrlError,
    validated_name,
    validated_project_id,
)
from holdfast_service.stores.posix import files as mount_proof
from holdfast_service.stores.posix.files import (
    INCOMING,
    Access,
    StagedFile,
    close_folder,
    exclude_writers,
    files_below,
    link_new,
    new_file,
    open_file,
    opened_folder,
    read_whole,
    remove_whatever,
    still_excluded,
    store_errors,
)
from holdfast_service.stores.posix.signed_urls import Grant, UrlSigner

_EXAMPLE = "posix:///var/lib/holdfast/store"
_PROOF_SUFFIX = ".sha256"
_READ_BYTES = 1024 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TICKET_ID = re.compile(r"[0-9a-zA-Z][0-9a-zA-Z-]{7,63}")


class PosixStore:
    """A Store and a MountedStore. `root` is the folder's path as the service sees it. The members of `group` may read
    the store and hand files over; without one, only the service's own user can."""

    kind = "posix"

    def __init__(
        self, root: Path, signer: UrlSigner, *, group: int | None = None, capabilities: Capabilities | None = None
    ) -> None:
        self.root = root
        self._access = Access(group)
        self.capabilities = capabilities
        self._signer = signer
        self._guard: Callable[[], None] = lambda: None

    def prepare(self) -> None:
        """Makes the folders. Not done at every start: where a mount is absent it would make a second, empty store."""
        with store_errors(self.root):
            self.root.mkdir(0o700, parents=True, exist_ok=True)
            self._close_root()
            for part in (INCOMING, mount_proof.PROOFS):
                with opened_folder(self.root, part, self._access):
                    pass

    def close_to_others(self) -> None:
        """Raises StoreRefused where others can enter the folder and the service must not be the one to change that."""
        with store_errors(self.root):
            self._close_root()

    def _close_root(self) -> None:
        holds_ours = (self.root / INCOMING).is_dir()
        close_folder(self.root, holds_ours=holds_ours, gid=self._access.gid)

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
        with store_errors(self.root):
            return StagedFile(self.root, self._access)

    def publish_staged(self, staged: StagedFile, key: ObjectKey) -> ObjectFacts:
        """Makes what the service wrote and hashed the object. An existing object stays as it is."""
        staged.sync()
        with store_errors(self.root):
            if link_new(self.root, staged.name, key.path, self._access):
                # Behind the fsync of the name: where there is a proof, `publish` need not repeat that.
                self._claim_proof(key, staged.sha256)
        return self.head(key)

    def _claim_proof(self, key: ObjectKey, sha256: str) -> None:
        with opened_folder(self.root, _folder_of(key.path)) as folder, suppress(FileExistsError):
            name = key.generation + _PROOF_SUFFIX
            with os.fdopen(new_file(folder, name, self._access), "w") as proof:
                proof.write(sha256)

    # Hand-over by clients with the mount.

    def new_mount_proof(self, *, expires_in_seconds: int) -> tuple[str, Path]:
        return mount_proof.new_mount_proof(self.root, expires_in_seconds, self._access)

    def check_mount_proof(self, proof_id: str, content: str) -> bool:
        return mount_proof.check_mount_proof(self.root, proof_id, content)

    def incoming_path(self, ticket_id: str) -> Path:
        if not _TICKET_ID.fullmatch(ticket_id):
            raise ValueError("a ticket id is 8 to 64 letters, digits and hyphens")
        return self.root / INCOMING / ticket_id

    def publish(self, ticket_id: str, key: ObjectKey, expected_bytes: int) -> None:
        source = self.incoming_path(ticket_id)
        with store_errors(self.root):
            try:
                found = self.head(key)
            except ObjectMissing:
                with suppress(FileNotFoundError):  # not seen here yet, or published by another just now
                    self._take_over(source, key, expected_bytes)
                found = self.head(key)
            if found.bytes != expected_bytes:
                raise ObjectMismatch(f"the store has {found.bytes} bytes, announced {expected_bytes}")
            if found.sha256 is None:  # the process that made the name may have died before it was durable
                with opened_folder(self.root, _folder_of(key.path)) as folder:
                    os.fsync(folder)
            remove_whatever(source)

    def _take_over(self, source: Path, key: ObjectKey, expected_bytes: int) -> None:
        """Publishes the source itself if nobody else can change it, and otherwise a file of the service's own with the
        same bytes. Raises FileNotFoundError if nothing was handed over."""
        with opened_folder(self.root, INCOMING) as incoming:
            try:
                # The service follows neither a symbolic link out of the store nor a pipe without a writer.
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                descriptor = os.open(source.name, flags, dir_fd=incoming)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                remove_whatever(source)
                raise ObjectMismatch("a symbolic link was handed over instead of a file") from None
        try:
            handed_over = os.fstat(descriptor)
            if not stat.S_ISREG(handed_over.st_mode) or handed_over.st_size != expected_bytes:
                remove_whatever(source)
                raise ObjectMismatch(
                    f"the file handed over has {handed_over.st_size} bytes, announced {expected_bytes}"
                )
            taken = self._without_copy(descriptor, source)
            with taken or self.stage() as staged:
                if taken is None:
                    staged.copy_from(descriptor, expected_bytes)
                    self._publish_whole(staged, key, expected_bytes)
                    return
                try:
                    staged.hash_taken()
                    if not still_excluded(descriptor):
                        raise ObjectMismatch("the file handed over was opened to write while the service took it")
                    self._publish_whole(staged, key, expected_bytes)
                except Exception:
                    # Not to be taken again: the kernel tells only once that a file's bytes could not reach the disk.
                    remove_whatever(source)
                    raise
        finally:
            os.close(descriptor)

    def _without_copy(self, descriptor: int, source: Path) -> StagedFile | None:
        """The file behind it. None if it must be copied: somebody else can change it, or there is no /proc."""
        with suppress(OSError):
            # Its one name must be the client's: another process that failed to publish it removes that first.
            if exclude_writers(descriptor) and os.path.samestat(os.fstat(descriptor), os.lstat(source)):
                return StagedFile(self.root, self._access, taken=descriptor)
        return None

    def _publish_whole(self, staged: StagedFile, key: ObjectKey, expected_bytes: int) -> None:
        if staged.bytes != expected_bytes:
            raise ObjectMismatch("the file handed over was cut while the service took it")
        self.publish_staged(staged, key)

    def _size(self, key: ObjectKey) -> int:
        descriptor = open_file(self.root, key.path)
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def object_path(self, key: ObjectKey) -> Path:
        return self.root / key.path

    def sweep_incoming(self, *, older_than_seconds: float) -> int:
        self._guard()
        removed = mount_proof.sweep_mount_proofs(self.root)
        oldest = self._filesystem_now() - older_than_seconds
        with (
            store_errors(self.root),
            opened_folder(self.root, INCOMING) as incoming,
            os.scandir(incoming) as entries,
        ):
            for entry in entries:
                with suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        remove_whatever(self.root / INCOMING / entry.name)
                        removed += 1
        return removed

    def _filesystem_now(self) -> float:
        """The file server's clock, which dated the files; ours may be off."""
        with self.stage() as staged:
            return staged.modified_at()

    # What the service itself reads and writes.

    def head(self, key: ObjectKey) -> ObjectFacts:
        with store_errors(self.root):
            size = self._size(key)
            try:
                claimed = read_whole(self.root, key.path + _PROOF_SUFFIX).decode(errors="replace")
            except FileNotFoundError:
                claimed = ""
        return ObjectFacts(size, claimed if _SHA256.fullmatch(claimed) else None, None)

    def open_object(self, key: ObjectKey) -> int:
        """A descriptor of the object, to read and to be closed by the caller."""
        with store_errors(self.root):
            return open_file(self.root, key.path)

    def open_read(self, key: ObjectKey) -> Iterator[bytes]:
        file = FileIO(self.open_object(key))
        if hasattr(os, "posix_fadvise"):  # not on macOS
            with store_errors(self.root):
                # A reading that proves the object is of the disk, and not of the kernel's memory.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
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
        self._delete(key.path + _PROOF_SUFFIX, key.path)

    def _delete(self, *names: str) -> None:
        """And the folder that they were in, if it is empty: other generations, and other records, may live there."""
        with store_errors(self.root):
            for name in names:
                with suppress(FileNotFoundError):
                    self._unlink(name)
            above, _, last = _folder_of(names[0]).rpartition("/")
            with suppress(OSError), opened_folder(self.root, above) as folder:  # or another delete was faster
                os.rmdir(last, dir_fd=folder)
        self.ping()  # that nothing was found proves nothing if the mount is absent

    def _unlink(self, name: str) -> None:
        with opened_folder(self.root, _folder_of(name)) as folder:
            os.unlink(name.rpartition("/")[2], dir_fd=folder)

    def list_objects(self, project_id: str | None) -> Iterator[StoredObject]:
        with store_errors(self.root):
            for each in self._projects() if project_id is None else (validated_project_id(project_id),):
                for name, entry in files_below(self.root, f"{each}/{CHUNKS}"):
                    yield from self._described(name, entry)
        self.ping()  # folders that vanished on the way were deleted only if the store is still there

    def _projects(self) -> Iterator[str]:
        """What may be a project's folder."""
        for entry in os.scandir(self.root):
            with suppress(ValueError):
                if entry.is_dir(follow_symlinks=False):
                    yield validated_project_id(entry.name)

    def _described(self, name: str, entry: os.DirEntry[str]) -> Iterator[StoredObject]:
        """Nothing for proofs, for files that a network filesystem keeps for itself, and for what was just deleted."""
        with suppress(ValueError, FileNotFoundError):
            key = ObjectKey.from_path(name)
            facts = entry.stat(follow_symlinks=False)
            yield StoredObject(key, facts.st_size, datetime.fromtimestamp(facts.st_mtime, UTC))

    def write_named(self, name: str, data: bytes) -> None:
        self._guard()
        above, _, last = validated_name(name).rpartition("/")
        with self.stage() as staged:
            staged.write(data)
            staged.sync()
            with (
                store_errors(self.root),
                opened_folder(self.root, INCOMING) as incoming,
                opened_folder(self.root, above, self._access) as folder,
            ):
                os.replace(Path(staged.name).name, last, src_dir_fd=incoming, dst_dir_fd=folder)
                os.fsync(folder)

    def read_named(self, name: str, *, most_bytes: int = MOST_NAMED_BYTES) -> bytes:
        with store_errors(self.root):
            data = read_whole(self.root, validated_name(name), most_bytes + 1)
        if len(data) > most_bytes:
            raise ObjectTooLarge(most_bytes)
        return data

    def delete_named(self, name: str) -> None:
        self._guard()
        self._delete(validated_name(name))

    def list_named(self, folder: str) -> Iterator[str]:
        with store_errors(self.root):
            for name, _ in files_below(self.root, validated_name(folder)):
                yield name
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
            with opened_folder(self.root, INCOMING):
                pass
            if not os.access(self.root / INCOMING, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "not writable")
            self._close_root()

    def close(self) -> None:
        """Nothing is kept open."""


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def open_store(url: str, opening: Opening) -> PosixStore:
    """A folder that does not exist is made. In one that exists nothing is made until `probe()`, because it may be a
    mount point without its mount. Raises StoreUrlError, and StoreRefused for a folder that is open to others."""
    signer = UrlSigner(opening.signing_key)
    parts = urlsplit(url)
    if parts.netloc:
        raise StoreUrlError(url, f"{parts.netloc!r} stands where the path begins; use three slashes", _EXAMPLE)
    root = Path(unquote(parts.path))
    if not root.is_absolute() or root == Path("/") or parts.query:
        raise StoreUrlError(url, "it must be the absolute path of one folder and nothing more", _EXAMPLE)
    store = PosixStore(root, signer, group=opening.group, capabilities=opening.capabilities)
    with suppress(StoreUnavailable):
        if root.exists():
            store.close_to_others()
        else:
            store.prepare()
    return store


PROBE_PROJECT = "probe"


def probe_posix(store: Store) -> Capabilities:
    """What the filesystem under a posix store really does, found by trying. Raises StoreRefused if a second write to
    one key replaces the first (no real link()).

    The service hashes what comes in through endpoints.py, whatever the filesystem. It knows only the size of a file
    that a client left, and head() then reports no checksum.
    """
    first, second = secrets.token_bytes(64), secrets.token_bytes(64)
    key = ObjectKey(PROBE_PROJECT, hashlib.sha256(first).hexdigest(), secrets.token_hex(16))
    try:
        facts = store.put_bytes(key, first)
        store.put_bytes(key, second)
        if b"".join(store.open_read(key)) != first:
            raise StoreRefused("the store's filesystem overwrites objects; use one with atomic hard links")
    finally:
        store.delete(key)
    return Capabilities(
        sha256_enforced=True,
        sha256_reported=facts.sha256 == key.digest,
        content_length_enforced=True,
        conditional_put=True,
        md5_enforced=False,
        range_get=True,
        versioned=False,
        probed_at=datetime.now(UTC),
        signature_enforced=True,  # by the service itself, which gives out its URLs
    )

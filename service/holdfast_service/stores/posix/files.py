"""The few file operations of a posix store, and the proofs that a client sees the same mount.

Each operation is durable when it returns, and none ever overwrites. Names are relative to the store's folder, which may
itself be reached by a symbolic link. Below it the service opens each part of a name from the folder before it, and
refuses a link: a client that can make a link in the store could make the service read or write elsewhere (rule
no-symlinks).

Here, and only here, an OSError becomes a StoreError.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import shutil
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import structlog

from holdfast_service.stores.base import (
    ObjectMissing,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)

# Only the service may open a folder that holds what it keeps for itself (rule no-symlinks).

_log = structlog.get_logger("holdfast.start")
_OTHERS = 0o007
_PROOF_BYTES = 4096
"""More than any proof has: a longer file is none."""
_NOT_THE_OWNER = 0o077


def close_folder(folder: Path, *, holds_ours: bool, gid: int | None = None) -> None:
    """Closes a folder of our own that others can enter. `holds_ours`: what is in it shows that the service made it,
    and closing it takes nothing away from another user. With `gid` that group may enter and read.

    A folder of another owner may be open to its group (a volume of Kubernetes is), not to others. Raises StoreRefused
    with the command to run, and OSError.
    """
    facts = os.stat(folder)
    wanted = 0o700 if gid is None else 0o2750
    mode, own = stat.S_IMODE(facts.st_mode), facts.st_uid == os.geteuid()
    closed = not mode & (_NOT_THE_OWNER if own and gid is None else _OTHERS)
    if closed and (gid is None or not own or (facts.st_gid == gid and mode == wanted)):
        return
    if own and (holds_ours or not any(folder.iterdir())):
        if gid is not None:
            os.chown(folder, -1, gid)
        folder.chmod(wanted)
        mode = stat.S_IMODE(os.stat(folder).st_mode)
        if mode == wanted:
            _log.warning("folder_closed", folder=str(folder), mode=f"{wanted:o}")
            return
    if mode & _OTHERS:
        raise StoreRefused(
            f"the folder {folder} is open to others (mode {mode:o}). Run `chmod o-rwx {folder}` as its owner, or name "
            "a folder inside it that does not exist yet: the service makes that one closed"
        )


INCOMING = "incoming"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_ABSENT = {errno.ENOENT, errno.ENOTDIR}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_SUCH_OPERATION = {errno.ENOTSUP, errno.ENOSYS, errno.EXDEV}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EMLINK, errno.ENAMETOOLONG, *_NO_SUCH_OPERATION}
_CANNOT_COPY = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL}
_PIECE_BYTES = 1024 * 1024


@contextmanager
def store_errors(root: Path) -> Iterator[None]:
    """Gives every OSError inside the name that the service acts upon."""
    try:
        yield
    except OSError as error:
        raise _translated(error, root) from error


def _translated(error: OSError, root: Path) -> StoreError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _ABSENT:
        if (root / INCOMING).is_dir():
            return ObjectMissing("there is no such object in the store")
        # Without its own folder the whole store is unavailable (not mounted): no object may be called missing then.
        return StoreUnavailable(f"the store's folder {root} is not there; check that it is mounted")
    if error.errno in _FULL:
        return StoreFull(f"the store at {root} is full ({reason}); free some room or raise its quota")
    if error.errno in _REFUSED:
        return StoreRefused(
            f"the store at {root} refuses the service ({reason}); check owner and permissions, "
            "and that it is a filesystem with hard links"
        )
    return StoreUnavailable(f"the store at {root} does not work now ({reason})")


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use what the service makes in a store: the service's own user; with `gid` the members of that group too,
    who read everything and write to `incoming`."""

    gid: int | None = None

    @property
    def file_mode(self) -> int:
        return 0o600 if self.gid is None else 0o640

    def folder_mode(self, name: str = "") -> int:
        if self.gid is None:
            return 0o700
        # What is made inside belongs to the group as well; in `incoming` a member removes only what is its own.
        return 0o3770 if name == INCOMING else 0o2750

    def give(self, descriptor: int, mode: int) -> None:
        """Whatever the process's umask says."""
        if self.gid is not None:
            os.chown(descriptor, -1, self.gid)
            os.fchmod(descriptor, mode)


def _open_inner(root: Path, parts: list[str], folder: int, flags: int, mode: int = 0o600) -> int:
    """The last of `parts`, inside the open `folder`. Raises StoreRefused for a symbolic link."""
    try:
        return os.open(parts[-1], flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR} and _is_link(folder, parts[-1]):
            raise symbolic_link(root, "/".join(parts)) from None
        raise


def _is_link(folder: int, name: str) -> bool:
    with suppress(FileNotFoundError):
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False


def symbolic_link(root: Path, name: str) -> StoreRefused:
    return StoreRefused(
        f"a symbolic link stands in the store at {root / name}, and the service follows none there; "
        "put the file or the folder itself in its place"
    )


@contextmanager
def opened_folder(root: Path, name: str = "", make: Access | None = None) -> Iterator[int]:
    """A descriptor of the folder `name` below `root`; of `root` itself without a name. With `make` it is created with
    all that is above it, and its own name is durable. Raises OSError, and StoreRefused for a symbolic link."""
    parts = name.split("/") if name else []
    descriptor = os.open(root, _FOLDER)
    try:
        for depth in range(1, len(parts) + 1):
            inner = _inner_folder(root, parts[:depth], descriptor, make, last=depth == len(parts))
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _inner_folder(root: Path, parts: list[str], folder: int, make: Access | None, *, last: bool) -> int:
    made = False
    while True:
        try:
            inner = _open_inner(root, parts, folder, _FOLDER)
        except FileNotFoundError:
            if make is None:
                raise
            with suppress(FileExistsError):
                os.mkdir(parts[-1], make.folder_mode(parts[-1]), dir_fd=folder)
                made = True
            continue  # also if a delete removed the empty folder at once
        if make is not None and made:
            make.give(inner, make.folder_mode(parts[-1]))
        if make is not None and (made or last):
            os.fsync(folder)  # also if another process created it just now
        return inner


def open_file(root: Path, name: str) -> int:
    """A descriptor of the file `name`, to read. Raises OSError, and StoreRefused for anything but a plain file."""
    above, _, last = name.rpartition("/")
    with opened_folder(root, above) as folder:
        # A pipe without a writer must not make the caller wait either.
        descriptor = _open_inner(root, [*above.split("/"), last], folder, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise StoreRefused(f"{root / name} is no plain file; remove it")


def read_whole(root: Path, name: str, most_bytes: int = _PROOF_BYTES) -> bytes:
    """The bytes of a small file, at most the first so many; raises as `open_file` does."""
    with os.fdopen(open_file(root, name), "rb") as file:
        return file.read(min(most_bytes, os.fstat(file.fileno()).st_size + 1))  # it takes so much memory first


def new_file(folder: int, name: str, access: Access) -> int:
    """A descriptor of a fresh file in the open `folder`, to write and to read. Raises OSError."""
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
    descriptor = os.open(name, flags, access.file_mode, dir_fd=folder)
    access.give(descriptor, access.file_mode)
    return descriptor


def files_below(root: Path, name: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Every file below the folder `name`: its name below `root`, and its entry, which can be asked for its facts until
    the next one is taken. Nothing for what a delete removed meanwhile. Raises OSError, and StoreRefused for a link."""
    with suppress(FileNotFoundError), opened_folder(root, name) as folder:
        with os.scandir(folder) as entries:
            found = list(entries)
        for entry in found:
            inner = f"{name}/{entry.name}"
            if entry.is_symlink():
                raise symbolic_link(root, inner)
            if entry.is_dir(follow_symlinks=False):
                yield from files_below(root, inner)
            else:
                yield inner, entry


def link_new(root: Path, source: str, destination: str, access: Access) -> bool:
    """Publishes `source` under a second name that was free until now. False if another file has that name."""
    source_folder, _, source_name = source.rpartition("/")
    above, _, name = destination.rpartition("/")
    while True:
        with opened_folder(root, source_folder) as old, opened_folder(root, above, access) as new:
            try:
                os.link(source_name, name, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)
            except FileExistsError:
                # Over NFS a retransmitted link() finds its own earlier success.
                linked = os.path.samestat(_facts(source_name, old), _facts(name, new))
            except FileNotFoundError:
                _facts(source_name, old)  # raises if it is the source that is missing
                continue  # a delete removed the empty folder between the two calls
            else:
                linked = True
            os.fsync(new)
            return linked


def _facts(name: str, folder: int) -> os.stat_result:
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def remove_whatever(path: Path) -> None:
    """What a client left in `incoming/`, which may be anything; its absence is fine. Follows no link."""
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):  # which of the two depends on the system
        shutil.rmtree(path)


def _copy_some(source: int, target: int, count: int) -> int:
    """How many bytes went from one descriptor's position to the other's: 0 at the source's end.

    The kernel shares the blocks where the filesystem can (XFS, Btrfs), lets the file server copy (NFS 4.2), or copies
    by itself. A filesystem that can do none of it, or answers 0 in the middle of a file, gets the bytes read and
    written."""
    try:
        copied = os.copy_file_range(source, target, count)
    except OSError as error:
        if error.errno not in _CANNOT_COPY:
            raise
        copied = 0
    if copied:
        return copied
    piece = os.read(source, min(count, _PIECE_BYTES))
    _write_all(target, piece)
    return len(piece)


def _write_all(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


# Whether somebody can still change a file that a client handed over. Who cannot be excluded makes the service copy it.
#
# The kernel knows who has a file open to write, and tells it by a read lease (fcntl(2), F_SETLEASE): it grants one only
# while nobody has the file open or mapped to write, and takes it away from the holder when somebody opens it so. On a
# network filesystem it knows nothing of the other hosts, so a lease counts only on a filesystem of this machine alone.

LOCAL_FILESYSTEMS = frozenset({b"ext4", b"xfs", b"tmpfs"})
"""Btrfs is none of them: it shares a copy's blocks, and its files do not tell which mount they are of."""
MOUNTS = Path("/proc/self/mountinfo")


def exclude_writers(descriptor: int) -> bool:
    """Whether the service is the only one who can change the file behind a descriptor: it is of the service's own user,
    who alone may write to it, has one name, lies on a filesystem of this machine, and nobody has it open to write. It
    lasts until the descriptor is closed, or until `still_excluded` says otherwise.

    Another process of the service's user can open it later, as it can every object of the store."""
    try:
        facts = os.fstat(descriptor)
        # Somebody else could have passed the kernel's check of the mode already, and arrive later. A list of other
        # users (ACL) shows in these bits.
        others_write = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if others_write or facts.st_uid != os.geteuid() or facts.st_nlink != 1:
            return False
        if _filesystem(facts.st_dev) not in LOCAL_FILESYSTEMS:
            return False
        # Without this the kernel tells the loss of a lease by SIGIO, which ends a process. Nobody hears SIGURG.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:  # EAGAIN: somebody writes; or the filesystem grants no lease, or /proc is absent
        return False
    return True


def still_excluded(descriptor: int) -> bool:
    """Whether nobody has opened the file to write since `exclude_writers`. Raises OSError."""
    return fcntl.fcntl(descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK


def _filesystem(device: int) -> bytes | None:
    """Its kind. Not by fstatfs(2): a 9p mount tells there what the host's filesystem is. Raises OSError."""
    number = f"{os.major(device)}:{os.minor(device)}".encode()
    with MOUNTS.open("rb") as mounts:  # a folder's name may be in any encoding
        for line in mounts:
            mount, _, filesystem = line.partition(b" - ")
            if mount.split(b" ")[2] == number:
                return filesystem.split(b" ")[0]
    return None


def _second_name(taken: int, name: str, folder: int, access: Access) -> int:
    """A descriptor of the same file, which has a name in the open `folder` then. Raises OSError."""
    os.fchmod(taken, access.file_mode)
    access.give(taken, access.file_mode)
    os.utime(taken)
    descriptor = os.dup(taken)
    try:
        # By the descriptor: another file may have the client's name for it by now.
        os.link(f"/proc/self/fd/{taken}", name, dst_dir_fd=folder)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class StagedFile:
    """A file in `incoming/` of the service's own: hashed as it is written, gone on `discard` unless published.

    With `taken` it is the file behind that descriptor, under a second name, and dated anew: the store's files tell when
    the service published them. Raises OSError if that file has no name any more."""

    def __init__(self, root: Path, access: Access, *, taken: int | None = None) -> None:
        self._root = root
        self._name = f"{secrets.token_hex(16)}.part"
        self.name = f"{INCOMING}/{self._name}"
        self._hash = hashlib.sha256()
        self._descriptor: int | None = None
        self.bytes = 0
        # A cancelled request discards while a thread may still be writing: a closed descriptor's number is soon
        # another file's.
        self._lock = threading.Lock()
        with opened_folder(root, INCOMING) as incoming:
            if taken is None:
                self._descriptor = new_file(incoming, self._name, access)
            else:
                self._descriptor = _second_name(taken, self._name, incoming, access)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        with self._lock, store_errors(self._root):
            self._hash.update(data)
            self.bytes += len(data)
            _write_all(self._open_descriptor(), data)

    def copy_from(self, source: int, count: int) -> None:
        """At most `count` bytes from a descriptor's position. The hash is of the bytes that this file then has: a
        process that still writes to the source changes neither."""
        with self._lock, store_errors(self._root):
            target, left = self._open_descriptor(), count
            while left and (copied := _copy_some(source, target, left)):
                left -= copied
            os.lseek(target, self.bytes, os.SEEK_SET)
            self._hash_rest(target)

    def hash_taken(self) -> None:
        with self._lock, store_errors(self._root):
            self._hash_rest(self._open_descriptor())

    def _hash_rest(self, descriptor: int) -> None:
        piece = memoryview(bytearray(_PIECE_BYTES))
        while read := os.readv(descriptor, [piece]):
            self._hash.update(piece[:read])
            self.bytes += read

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def sync(self) -> None:
        with self._lock, store_errors(self._root):
            os.fsync(self._open_descriptor())

    def modified_at(self) -> float:
        """By the clock of the file server."""
        with self._lock, store_errors(self._root):
            return os.fstat(self._open_descriptor()).st_mtime

    def discard(self) -> None:
        """Closes it and removes its first name; a published object has its own by then."""
        with self._lock, store_errors(self._root), suppress(FileNotFoundError):
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
                with opened_folder(self._root, INCOMING) as incoming:
                    os.unlink(self._name, dir_fd=incoming)

    def __enter__(self) -> StagedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise OSError(errno.EBADF, "discarded")
        return self._descriptor


PROOFS = "proofs"
_PROOF_ID = re.compile(r"[0-9a-f]{32}")


def new_mount_proof(root: Path, expires_in_seconds: int, access: Access) -> tuple[str, Path]:
    """The id (32 hex digits, the first 8 of them say when it expires) and the path of a fresh secret. A client proves
    that it sees the same mount by this file's content.

    A nonce, not an id file: a snapshot of the store would copy an id, and the id would prove nothing (rule drop-box).
    The file itself is the record, and any process of the service can check what another one offered.
    """
    proof_id = f"{int(time.time()) + expires_in_seconds:08x}{secrets.token_hex(12)}"
    with store_errors(root), opened_folder(root, PROOFS) as folder:
        with os.fdopen(new_file(folder, proof_id, access), "w") as file:
            file.write(secrets.token_hex(32))
    return proof_id, root / PROOFS / proof_id


def check_mount_proof(root: Path, proof_id: str, content: str) -> bool:
    """Whether `content` is what that file holds, and it has not expired."""
    if not _PROOF_ID.fullmatch(proof_id) or time.time() >= int(proof_id[:8], 16):
        return False
    with store_errors(root):
        try:
            written = read_whole(root, f"{PROOFS}/{proof_id}")
        except FileNotFoundError:
            return False
    return hmac.compare_digest(written, content.encode())


def sweep_mount_proofs(root: Path) -> int:
    """Removes the expired ones; how many."""
    removed = 0
    with store_errors(root), opened_folder(root, PROOFS) as folder, os.scandir(folder) as entries:
        for entry in entries:
            if _PROOF_ID.fullmatch(entry.name) and time.time() >= int(entry.name[:8], 16):
                with suppress(FileNotFoundError):
                    os.unlink(entry.name, dir_fd=folder)
                    removed += 1
    return removed

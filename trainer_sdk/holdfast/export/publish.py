"""All of it or nothing: a folder is filled beside its final place and renamed once it is whole and on disk."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from holdfast_client.errors import ConfigurationError, HoldfastError
from holdfast_client.local.private_folder import try_lock

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# torch's and safetensors' writers are native code and report a full disk in words only.
_FULL_WORDS = re.compile(r"No space left|File too large|Disk quota|os error (28|27|122)\b|unexpected pos")
_MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(rb"\\([0-7]{3})")
_SPARE_BYTES = 16 * 1024**2
_OLD = ".old"
"""Ends the name of what is replaced, until the new folder is in its place."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DiskFull(HoldfastError):  # noqa: N818  (as the tree of holdfast_client.errors)
    code = "disk_full"
    remedy = "Free some space there, or choose another folder."


def place_of(target: Path) -> Path:
    """Where a link leads: the folder there is made or replaced, on that disk, and the link stays."""
    return Path(os.path.realpath(target)) if target.is_symlink() else target


def check_target(target: Path, *, force: bool) -> None:
    """Raises ConfigurationError unless the folder can be made, or replaced."""
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"{target} is not a folder. Choose another one.")
    if not force and target.is_dir() and any(target.iterdir()):
        raise _not_empty(target)
    if not target.absolute().parent.is_dir():
        raise ConfigurationError(f"{target.absolute().parent} is not there. Make it first.")
    if _is_mount(target):  # no finished folder can take its place
        raise ConfigurationError(f"{target} is where a file system is mounted. Choose a folder in it, which is made.")


def _is_mount(target: Path) -> bool:
    """Where a folder of the same file system is mounted, only Linux's list of mounts tells it."""
    if os.path.ismount(target):
        return True
    try:
        mounts = [line.split()[4] for line in _MOUNTS.read_bytes().splitlines()]
    except OSError:
        return False
    place = os.fsencode(target.absolute().parent.resolve() / target.absolute().name)
    return any(_OCTAL.sub(lambda found: bytes([int(found[1], 8)]), each) == place for each in mounts)


def _not_empty(target: Path) -> ConfigurationError:
    return ConfigurationError(f"{target} is not empty. Choose another folder, or replace it with --force.")


def check_room(target: Path, needed_bytes: int) -> None:
    """Raises DiskFull before anything is fetched in vain."""
    free_bytes = shutil.disk_usage(target.absolute().parent).free
    if free_bytes < needed_bytes + _SPARE_BYTES:
        raise DiskFull(
            f"{needed_bytes / 1024**3:.2f} GiB are needed beside {target}, and {free_bytes / 1024**3:.2f} GiB are free"
        )


class NotWritten(HoldfastError):  # noqa: N818  (as the tree of holdfast_client.errors)
    code = "not_written"
    remedy = "Fix that, or choose another folder or format."


def clear_leftovers(target: Path) -> None:
    """Removes the half-filled folders that killed pulls into `target` have left beside it on this machine. What one was
    replacing comes back, unless the new one is there already. The system releases a dead process's lock, so a folder
    without one is a dead pull's. A file system without locks keeps them."""
    target = target.absolute()
    left = re.compile(re.escape(_beside(target)) + "[0-9a-f]{8}")
    with suppress(OSError):  # what cannot be listed cannot be cleared away
        names = [name for name in os.listdir(target.parent) if left.fullmatch(name.removesuffix(_OLD))]
        for name in sorted(names, reverse=True):  # what was replaced, before the folder whose lock tells of it
            folder = target.parent / name
            remove = partial(shutil.rmtree, folder, ignore_errors=True)
            if not name.endswith(_OLD):
                _if_dead(folder, remove)
            elif target.is_dir() and any(target.iterdir()):
                remove()
            else:
                _if_dead(folder.with_name(name.removesuffix(_OLD)), partial(folder.rename, target))


def _if_dead(folder: Path, act: Callable[[], object]) -> None:
    """Calls `act` unless the folder is that of a pull that goes on."""
    with suppress(OSError):
        descriptor = os.open(folder, _FOLDER)
        try:
            if try_lock(descriptor):
                act()
        finally:
            os.close(descriptor)


def _beside(target: Path) -> str:
    """The beginning of the names beside `target`. Some file systems that machines share keep locks on one machine, so
    each machine takes away its own only."""
    machine = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
    return f".{target.name}.holdfast-{machine}"


@contextmanager
def _locked_folder(target: Path) -> Iterator[Path]:
    """A new one beside it, which no other pull takes for a dead one's."""
    while True:
        folder = target.with_name(_beside(target) + secrets.token_hex(4))
        folder.mkdir()
        try:
            descriptor = os.open(folder, _FOLDER)
        except FileNotFoundError:  # another pull has cleared it away before it was locked
            continue
        try:
            with suppress(OSError):  # no locks there, so nobody clears anything away
                if not try_lock(descriptor) or not _is_at(descriptor, folder):
                    continue
            yield folder
            return
        finally:
            os.close(descriptor)


@contextmanager
def work_folder(parent: Path, name: str) -> Iterator[Path]:
    """A new one in `parent` for this user alone, which is removed at the end. So is what killed processes of this
    machine have left there of theirs, by the same name."""
    target = parent.absolute() / name
    clear_leftovers(target)
    with _locked_folder(target) as folder:
        try:
            folder.chmod(0o700)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _is_at(descriptor: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False


@contextmanager
def published(target: Path, *, force: bool) -> Iterator[Path]:
    """An empty folder to fill; it replaces `target` when the block ends well, and is removed if not. Raises
    ConfigurationError if something has come into `target` meanwhile; not with `force`."""
    target = target.absolute()
    with _locked_folder(target) as beside:
        yield from _filled(beside, target, force=force)


def _filled(beside: Path, target: Path, *, force: bool) -> Iterator[Path]:
    try:
        yield beside
        for folder, _, _ in os.walk(beside):
            _sync_folder(Path(folder))
        _take_place(beside, target, force=force)
    except Exception as error:
        if _is_full(error):
            raise DiskFull(f"The disk became full while {target} was written; nothing was left there") from error
        if isinstance(error, MemoryError | RuntimeError | SafetensorError) and not isinstance(error, HoldfastError):
            # The writers of torch and safetensors are native code: their message is the only information.
            cause = str(error).partition("\n")[0] or "there was not enough memory"
            raise NotWritten(f"{target} could not be written: {cause}") from error
        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _take_place(beside: Path, target: Path, *, force: bool) -> None:
    if not target.is_dir():
        try:
            beside.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another pull's has come this very moment
                raise
        else:
            _sync_folder(target.parent)
            return
    old = beside.with_name(beside.name + _OLD)
    target.rename(old)
    try:
        # By this name no other process finds it any more: another pull may have put its files there.
        if not force and any(old.iterdir()):
            raise _not_empty(target)
        beside.rename(target)
    except BaseException:
        old.rename(target)
        raise
    _sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if not isinstance(error, HoldfastError) and _FULL_WORDS.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False

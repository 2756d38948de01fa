"""Memory that a rank stages into and the agent reads: a sealed memfd. And what limits it on this node.

A memfd has no name that another user could open, does not count against the size of /dev/shm, and is freed with the
last process that maps it. Its pages are charged to the container of the rank, which touches them first.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_ids = itertools.count(1)
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
_MFD_NOEXEC_SEAL = 8
_SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW
"""Nobody can shrink it under a reader: that reader would be killed by SIGBUS."""


class SharedMemory:
    """A rank's. `map` is its mapping; `id` is its own in this process."""

    def __init__(self, size_bytes: int) -> None:
        """Raises OSError or MemoryError if there is none."""
        self.id = next(_ids)
        self.bytes = size_bytes
        self.descriptor = _memfd()
        try:
            os.ftruncate(self.descriptor, size_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.map = mmap.mmap(self.descriptor, size_bytes)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.is_closed = False
        self.may_be_read = False
        """An agent that does not answer may still read it: no other save may come into it."""
        self.is_kept = False
        """The agent keeps the state in it, until it is told that the next save is staged there."""
        self.on_close: Callable[[], None] | None = None
        """Of the agent that maps it too."""

    def close(self) -> None:
        """The mapping ends with its last view. May be called twice."""
        if not self.is_closed:
            self.is_closed = True
            os.close(self.descriptor)
            if self.on_close is not None:
                self.on_close()


def _memfd() -> int:
    """Of what can never be executed: a hardened host (vm.memfd_noexec=2) gives no other. Raises OSError."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("holdfast-staging", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("holdfast-staging", flags)  # Linux before 6.3


class UnusableMemory(Exception):  # noqa: N818
    """The descriptor is no memory that is safe to read."""


def map_of(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Another process's memory, for reading. Raises UnusableMemory if it is shorter, or could become so."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        found = os.fstat(descriptor).st_size
    except OSError as error:
        raise UnusableMemory(f"it is no memfd ({error.strerror})") from error
    if seals & _SEALS != _SEALS or found < size_bytes:
        raise UnusableMemory("it can be cut off, or is too short")
    return mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ)


def untouched_bytes(descriptor: int, size_bytes: int) -> int:
    """Bytes of it that the system has still to find memory for."""
    return max(0, size_bytes - os.fstat(descriptor).st_blocks * 512)


def gib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**3:.2f} GiB"


class Budget:
    """The bytes that all ranks of the node may share with the agent. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._taken = 0
        self._lock = threading.Lock()

    @property
    def taken_bytes(self) -> int:
        return self._taken

    def take(self, size_bytes: int, untouched: int, *, ranks: int = 1, promised: int = 0) -> str | None:
        """None if it is taken, else why not, and what to do. `untouched`: how much new memory the system must find.
        `ranks`: there must be room for so many of them, of which one is taken. `promised`: what is still to be found
        for others."""
        with self._lock:
            if (why := self.lacks(size_bytes * ranks, untouched * ranks + promised)) is None:
                self._taken += size_bytes
        return why

    def lacks(self, size_bytes: int, untouched: int, *, freed: int = 0) -> str | None:
        """Why there would be no room, and what to do, once so much were `freed`; None: there would be."""
        if self._taken - freed + size_bytes > self.limit_bytes:
            return (
                f"the ranks of this node share {gib(self._taken)} with the agent already, and "
                f"{gib(size_bytes)} more would be over its limit of {gib(self.limit_bytes)}. Start it with "
                "a larger `--memory`, or bound each rank's staging with host_memory="
            )
        free = available_bytes()
        if free is not None and untouched > free + freed:
            return (
                f"this node has {gib(free)} of memory available, and staging needs {gib(untouched)} more. "
                "Bound each rank's staging with host_memory=, or give the node more memory"
            )
        return None

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self._taken -= size_bytes


_MEMINFO = Path("/proc/meminfo")


def available_bytes() -> int | None:
    """What the node can still give; None where the system does not say."""
    return _of_meminfo("MemAvailable")


def default_limit_bytes() -> int:
    """Half of the node's memory."""
    return (_of_meminfo("MemTotal") or 64 * 1024**3) // 2


def _of_meminfo(name: str) -> int | None:
    with suppress(OSError):
        if found := re.search(rf"^{name}:\s+(\d+) kB", _MEMINFO.read_text(encoding="ascii"), re.MULTILINE):
            return int(found[1]) * 1024
    return None


def container_room_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """What the memory limit of this process's container leaves: the tightest of its cgroups, version 1 or 2. Pages of
    files that the system can drop do not count. None: there is no limit."""
    rooms = [room for folder in _cgroups(groups, own) if (room := _room_of(folder)) is not None]
    return min(rooms, default=None)


def shares_container(process: int, processes: Path = Path("/proc")) -> bool:
    """Whether that process has this one's cgroups, so that one limit is for both. False if it cannot be seen."""
    with suppress(OSError):
        own, theirs = (processes / name / "cgroup" for name in ("self", str(process)))
        return process > 0 and own.read_bytes() == theirs.read_bytes()
    return False


_NO_LIMIT = 2**60
"""Version 1 has no word for that, only a number near the largest."""


def _cgroups(groups: Path, own: Path) -> list[Path]:
    with suppress(OSError):
        found = []
        for line in own.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            base = groups if controllers == "" else groups / "memory"
            place = base / path.lstrip("/")
            found += [place, *(parent for parent in place.parents if parent.is_relative_to(base))]
            found.append(base)  # in a container the path may be the host's, and only the root is mounted
        return list(dict.fromkeys(found))
    return []


def _room_of(folder: Path) -> int | None:
    for limit, used, dropped in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):
            most = int((folder / limit).read_text(encoding="ascii"))
            if most >= _NO_LIMIT:
                return None
            stat = (folder / "memory.stat").read_text(encoding="ascii")
            droppable = re.search(rf"^{dropped} (\d+)$", stat, re.MULTILINE)
            current = int((folder / used).read_text(encoding="ascii"))
            return max(0, most - current + (int(droppable[1]) if droppable else 0))
    return None

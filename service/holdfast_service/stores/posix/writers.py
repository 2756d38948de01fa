"""Whether somebody can still change a file that a client handed over. Who cannot be excluded makes the service copy it.

The kernel knows who has a file open to write, and tells it by a read lease (fcntl(2), F_SETLEASE): it grants one only
while nobody has the file open or mapped to write, and takes it away from the holder when somebody opens it so. On a
network filesystem it knows nothing of the other hosts, so a lease counts only on a filesystem of this machine alone.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
from pathlib import Path

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

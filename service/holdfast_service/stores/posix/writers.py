"""Whether somebody can still change a file that a client handed over. Who cannot be excluded makes the service copy it.

The kernel knows who has a file open to write, and tells it by a read lease (fcntl(2), F_SETLEASE): it grants one only
while nobody has the file open or mapped to write, and takes it away from the holder when somebody opens it so. On a
network filesystem it knows nothing of the other hosts, so a lease counts only on a filesystem of this machine alone.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import stat

LOCAL_FILESYSTEMS = {0xEF53, 0x58465342, 0x9123683E, 0x01021994}
"""ext2 to ext4, XFS, Btrfs and tmpfs, by their numbers in linux/magic.h."""
_STATFS_BYTES = 512


def exclude_writers(descriptor: int, mode: int) -> bool:
    """Gives the file behind a descriptor `mode`, and says whether the service is the only one who can change it: it is
    a file of the service's own user, under one name, on a filesystem of this machine, and nobody has it open to write.
    It lasts until the descriptor is closed, or until `still_excluded` says otherwise.

    Another process of the service's user can open it later, as it can every object of the store."""
    try:
        facts = os.fstat(descriptor)
        if facts.st_uid != os.geteuid() or facts.st_nlink != 1 or not _is_of_this_machine(descriptor):
            return False
        os.fchmod(descriptor, mode)
        # Without this the kernel tells the loss of a lease by SIGIO, which ends a process. Nobody hears SIGURG.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:  # EAGAIN: somebody writes; or the filesystem grants none
        return False
    return True


def still_excluded(descriptor: int) -> bool:
    """Whether nobody has opened the file to write since `exclude_writers`. Raises OSError."""
    return fcntl.fcntl(descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK


def _is_of_this_machine(descriptor: int) -> bool:
    facts = ctypes.create_string_buffer(_STATFS_BYTES)
    answer: int = ctypes.CDLL(None).fstatfs(descriptor, facts)
    # The first field is the filesystem's number, which fits in 32 bits.
    return answer == 0 and ctypes.c_uint32.from_buffer(facts).value in LOCAL_FILESYSTEMS

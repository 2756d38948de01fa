"""A folder that holds what the service keeps for itself is open to nobody else (protocol rule 45)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import structlog

from holdfast_service.stores.base import StoreRefused

_log = structlog.get_logger("holdfast.start")
_OTHERS = 0o007
_NOT_THE_OWNER = 0o077


def close_folder(folder: Path, *, holds_ours: bool, gid: int | None = None) -> None:
    """Closes a folder of our own that others can enter. `holds_ours`: what is in it shows that the service made it,
    so that closing it takes nothing away from anybody else. With `gid` that group may enter and read.

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

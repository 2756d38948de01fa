"""Programs that only Debian and Ubuntu package, unpacked by scripts/prepare-debian below this environment."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

_SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare-debian"
_NO_APT = 69
_UNPACKS_WITHIN_SECONDS = 280


class NoAptError(Exception):
    """This machine does not have the program, and no apt to get it with."""


def debian_program(package: str, binary: str) -> Path:
    """The installed program, else that of the package, at `binary` below the folder into which it was unpacked. Raises
    NoAptError."""
    installed = shutil.which(Path(binary).name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    return Path(installed) if installed is not None else unpacked(package, binary) / binary


def unpacked(package: str, binary: str, *further: str) -> Path:
    """The folder into which the package was unpacked, with `further` packages. Raises NoAptError."""
    environment = Path(sys.prefix)
    with (environment / f".{package}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [str(_SCRIPT), package, binary, str(environment), *further],
            capture_output=True,
            text=True,
            timeout=_UNPACKS_WITHIN_SECONDS,
        )
    if done.returncode == _NO_APT:
        raise NoAptError(done.stderr.strip())
    if done.returncode != 0:
        raise RuntimeError(f"{package} could not be unpacked: {done.stderr.strip()[-2000:]}")
    return environment / "debian" / package

"""Programs that only Debian and Ubuntu package, unpacked by scripts/prepare-debian below this environment."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from tests.support.prepare import prepare


def debian_program(package: str, binary: str) -> Path:
    """The installed program, else that of the package, at `binary` below the folder into which it was unpacked. Raises
    NotHereError."""
    installed = shutil.which(Path(binary).name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    return Path(installed) if installed is not None else unpacked(package, binary) / binary


def unpacked(package: str, binary: str, *further: str) -> Path:
    """The folder into which the package was unpacked, with `further` packages. Raises NotHereError."""
    prepare("debian", package, package, binary, sys.prefix, *further)
    return Path(sys.prefix) / "debian" / package

"""The file of a backup: a zip archive with `holdfast-backup.json` and the catalog.

    SQLite     catalog.db
    Postgres   tables/NAME, a table's rows as COPY writes them

An archive's index is written last, and each member has a checksum: half a file, or a spoilt one, is no backup.
"""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

from pydantic import TypeAdapter

FORMAT = 1
MANIFEST = "holdfast-backup.json"
CATALOG = "catalog.db"
TABLES = "tables/"


class BackupRefusedError(RuntimeError):
    """The backup cannot be made, or is none that this version can restore here. Nothing was changed."""


@dataclass(frozen=True)
class Backup:
    """`tables`: of Postgres, by name the columns in their order. `sequences`: their last values. `made_at`: UTC."""

    catalog_id: str
    epoch: int
    revision: str
    database: Literal["sqlite", "postgresql"]
    made_at: str
    holdfast: str
    tables: dict[str, list[str]]
    sequences: dict[str, int]
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


_BACKUP = TypeAdapter(Backup)
_MOST_MANIFEST_BYTES = 16 * 1024**2


def read_manifest(archive: zipfile.ZipFile) -> Backup:
    """Raises BackupRefusedError."""
    with member(archive, MANIFEST) as file:
        content = file.read(_MOST_MANIFEST_BYTES)
    try:
        told = json.loads(content)
        if told.get("format") != FORMAT:
            raise BackupRefusedError(
                f"The backup has format {told.get('format')!r}, and this version reads {FORMAT}. Install the Holdfast "
                f"that wrote it ({told.get('holdfast')})."
            )
        return _BACKUP.validate_python(told)
    except (ValueError, AttributeError, RecursionError):
        raise BackupRefusedError("This is no backup of Holdfast: it does not say what it holds.") from None


def member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    """Raises BackupRefusedError."""
    try:
        return archive.open(name)
    except (KeyError, RuntimeError):  # it is not there, or is encrypted, which no backup is
        raise BackupRefusedError(f"This is no backup of Holdfast: it has no {name} that can be read.") from None


def sync_folder(folder: Path) -> None:
    """Its names are durable then. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

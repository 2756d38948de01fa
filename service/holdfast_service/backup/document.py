"""The file of a backup: a zip archive with `holdfast-backup.json` and the catalog.

    SQLite     catalog.db
    Postgres   tables/NAME, a table's rows as COPY writes them

An archive's index is written last, and each member has a checksum: half a file, or a spoilt one, is no backup.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict, dataclass
from typing import Literal

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


def read_manifest(archive: zipfile.ZipFile) -> Backup:
    """Raises BackupRefusedError."""
    try:
        told = json.loads(archive.read(MANIFEST))
        if told.get("format") != FORMAT:
            raise BackupRefusedError(
                f"The backup has format {told.get('format')!r}, and this version reads {FORMAT}. Install the Holdfast "
                f"that wrote it ({told.get('holdfast')})."
            )
        return Backup(**told)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise BackupRefusedError("This is no backup of Holdfast: it does not say what it holds.") from None

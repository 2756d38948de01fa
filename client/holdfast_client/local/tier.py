"""The local tier of this node, opened as the settings say: the chunk folder, and the spool in it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Self

from holdfast_client.errors import ConfigurationError
from holdfast_client.local.chunk_folder import ChunkFolder
from holdfast_client.local.spool import Spool
from holdfast_client.settings import ClientSettings


class LocalTier:
    """Thread-safe, and safe between the processes of a node."""

    def __init__(self, path: Path, limit_bytes: int | None) -> None:
        """`limit_bytes`: without it nine tenths of the disk. Raises ConfigurationError where it cannot be used."""
        self.path = path.expanduser().absolute()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if limit_bytes is None:
                limit_bytes = shutil.disk_usage(self.path).total // 10 * 9
            self.folder = ChunkFolder(self.path, limit_bytes=limit_bytes)
            self.spool = Spool(self.folder)
        except OSError as error:
            raise ConfigurationError(
                f"The local folder {self.path} cannot be used ({error.strerror or error}). "
                "Set HOLDFAST_LOCAL_DIR to one on a local disk, which this user may write to."
            ) from error

    @classmethod
    def of(cls, settings: ClientSettings, path: str | Path | None = None) -> Self | None:
        """As the settings say; `path` wins over them. None where nobody names a folder."""
        where = path or settings.local_dir
        return None if where is None else cls(Path(where), settings.local_bytes)

    def close(self) -> None:
        """Twice is fine. What is in the folder stays."""
        self.spool.close()
        self.folder.close()

"""Buckets with generations: an index in SQLite, one file per generation. They outlive the process."""

from __future__ import annotations

import base64
import hashlib
import sqlite3
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import google_crc32c

from tests.support.gcs_fake.replies import Refusal, no_such_bucket, no_such_key, precondition_failed

_TABLE = """
CREATE TABLE IF NOT EXISTS objects (
    bucket TEXT, name TEXT, generation INTEGER UNIQUE, live INTEGER, size INTEGER, md5 TEXT, crc32c TEXT,
    PRIMARY KEY (bucket, name, generation)
)
"""


@dataclass(frozen=True)
class StoredObject:
    """Digests are base64, as Google shows them."""

    bucket: str
    name: str
    generation: int
    live: bool
    size: int
    md5: str
    crc32c: str

    @property
    def created_at(self) -> datetime:
        """A generation is the time of its making, in microseconds."""
        return datetime.fromtimestamp(self.generation / 1e6, UTC)


class Incoming:
    """A body on its way in. Nothing of it is visible before `Objects.publish`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"incoming-{time.monotonic_ns()}-{threading.get_ident()}"
        self._file = self.path.open("wb")
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._crc32c = google_crc32c.Checksum()
        self.size = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._md5.update(data)
        self._crc32c.update(data)
        self.size += len(data)

    @property
    def md5(self) -> str:
        return base64.b64encode(self._md5.digest()).decode()

    @property
    def crc32c(self) -> str:
        return base64.b64encode(self._crc32c.digest()).decode()

    def close(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)

    def flush(self) -> None:
        self._file.flush()


class Objects:
    """`buckets` says of each whether it keeps versions; those that retain let nothing go for a day."""

    def __init__(self, folder: Path, buckets: dict[str, bool], retaining: Collection[str] = ()) -> None:
        self._retaining = retaining
        self._folder = folder
        self._buckets = buckets
        self._database = sqlite3.connect(folder / "index.db", isolation_level=None)
        self._database.execute("PRAGMA synchronous=OFF")
        self._database.execute(_TABLE)
        for left_behind in folder.glob("incoming-*"):
            left_behind.unlink()

    def receive(self, bucket: str) -> Incoming:
        self._must_exist(bucket)
        return Incoming(self._folder)

    def publish(self, bucket: str, name: str, incoming: Incoming, *, generation_match: int | None) -> StoredObject:
        """PreconditionFailed unless the live generation is this one; 0 means that there is none."""
        live = self._live(bucket, name)
        if generation_match is not None and generation_match != (live.generation if live else 0):
            raise precondition_failed()
        newest = self._database.execute("SELECT max(generation) FROM objects").fetchone()[0] or 0
        generation = max(time.time_ns() // 1000, newest + 1)
        incoming.flush()
        incoming.path.rename(self.body(generation))
        if live is not None:
            self._retire(live)
        row = (bucket, name, generation, 1, incoming.size, incoming.md5, incoming.crc32c)
        self._database.execute("INSERT INTO objects VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        return StoredObject(bucket, name, generation, True, incoming.size, incoming.md5, incoming.crc32c)

    def find(self, bucket: str, name: str, generation: int | None = None) -> StoredObject:
        self._must_exist(bucket)
        found = self._live(bucket, name) if generation is None else self._exactly(bucket, name, generation)
        if found is None:
            raise no_such_key(bucket, name)
        return found

    def delete(self, bucket: str, name: str, generation: int | None, *, generation_match: int | None = None) -> None:
        """With a generation those bytes go; without, a bucket that keeps versions only hides them."""
        found = self.find(bucket, name, generation)
        if self.retained_until(found) is not None:
            raise Refusal(403, "RetentionPolicyNotMet", reason="retentionPolicyNotMet")
        if generation_match is not None and generation_match != found.generation:
            raise precondition_failed()
        if generation is None:
            self._retire(found)
        else:
            self._remove(found)

    def retained_until(self, stored: StoredObject) -> datetime | None:
        return stored.created_at + timedelta(days=1) if stored.bucket in self._retaining else None

    def page(
        self, bucket: str, prefix: str, after: str, most: int, *, versions: bool
    ) -> tuple[list[StoredObject], str]:
        """A page in the order of the names, and the token of the next one; empty if this is the last."""
        self._must_exist(bucket)
        rows = self._database.execute(
            "SELECT bucket, name, generation, live, size, md5, crc32c FROM objects "
            "WHERE bucket = ? AND substr(name, 1, ?) = ? AND (live OR ?) AND name || ':' || generation > ? "
            "ORDER BY name || ':' || generation LIMIT ?",
            (bucket, len(prefix), prefix, versions, after, most + 1),
        ).fetchall()
        page = [_stored(row) for row in rows[:most]]
        return page, f"{page[-1].name}:{page[-1].generation}" if len(rows) > most else ""

    def body(self, generation: int) -> Path:
        return self._folder / str(generation)

    def _must_exist(self, bucket: str) -> None:
        if bucket not in self._buckets:
            raise no_such_bucket()

    def _live(self, bucket: str, name: str) -> StoredObject | None:
        return self._one("bucket = ? AND name = ? AND live", bucket, name)

    def _exactly(self, bucket: str, name: str, generation: int) -> StoredObject | None:
        return self._one("bucket = ? AND name = ? AND generation = ?", bucket, name, generation)

    def _one(self, condition: str, *values: object) -> StoredObject | None:
        columns = "bucket, name, generation, live, size, md5, crc32c"
        row = self._database.execute(f"SELECT {columns} FROM objects WHERE {condition}", values).fetchone()
        return None if row is None else _stored(row)

    def _retire(self, live: StoredObject) -> None:
        if self._buckets[live.bucket]:
            self._database.execute("UPDATE objects SET live = 0 WHERE generation = ?", (live.generation,))
        else:
            self._remove(live)

    def _remove(self, found: StoredObject) -> None:
        self._database.execute("DELETE FROM objects WHERE generation = ?", (found.generation,))
        self.body(found.generation).unlink()


def _stored(row: tuple[str, str, int, int, int, str, str]) -> StoredObject:
    bucket, name, generation, live, size, md5, crc32c = row
    return StoredObject(bucket, name, generation, bool(live), size, md5, crc32c)


def check_hashes(incoming: Incoming, announced: str) -> None:
    """`md5=...` and `crc32c=...`, in one header or several. BadDigest if one is not that of the bytes."""
    computed = {"md5": incoming.md5, "crc32c": incoming.crc32c}
    for part in filter(None, (each.strip() for each in announced.split(","))):
        name, _, value = part.partition("=")
        if name not in computed or not value:
            raise Refusal(400, "InvalidDigest", f"The hash {name!r} is not valid.")
        if computed[name] != value:
            raise Refusal(400, "BadDigest", f"The {name} you specified did not match what we computed.")

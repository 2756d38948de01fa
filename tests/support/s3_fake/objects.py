"""What a bucket holds, and what its storage classes let through. The clock is the test's."""

from __future__ import annotations

import base64
import hashlib
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from email.utils import format_datetime

from tests.support.s3_fake.replies import Refusal

CLASSES = {"STANDARD", "STANDARD_IA", "GLACIER_IR", "GLACIER", "DEEP_ARCHIVE"}
_MINUTE, _HOUR = timedelta(minutes=1), timedelta(hours=1)
# How long a restore really takes here: shorter than the longest time that Amazon documents.
_TAKES = {
    ("GLACIER", "Expedited"): 3 * _MINUTE,
    ("GLACIER", "Standard"): 4 * _HOUR,
    ("GLACIER", "Bulk"): 9 * _HOUR,
    ("DEEP_ARCHIVE", "Standard"): 11 * _HOUR,
    ("DEEP_ARCHIVE", "Bulk"): 40 * _HOUR,
}


@dataclass(frozen=True)
class Thaw:
    ready_at: datetime
    expires_at: datetime


@dataclass(frozen=True)
class Stored:
    body: bytes
    storage_class: str
    sha256: str | None
    modified_at: datetime
    thaw: Thaw | None = None
    version_id: str | None = None

    @property
    def archived(self) -> bool:
        return self.storage_class in {"GLACIER", "DEEP_ARCHIVE"}


class Objects:
    """One bucket. `now` is the archives' clock. A `versioned` one keeps what is overwritten or deleted."""

    def __init__(self, now: Callable[[], datetime], *, versioned: bool = False) -> None:
        self._now = now
        self._lock = threading.RLock()
        self._stored: dict[str, Stored] = {}
        self._versioned = versioned
        self._versions: dict[tuple[str, str], Stored] = {}

    def find(self, key: str, version_id: str | None = None) -> Stored:
        with self._lock:
            if version_id is not None:
                if (key, version_id) not in self._versions:
                    raise Refusal(404, "NoSuchVersion", "The specified version does not exist.")
                return self._versions[key, version_id]
            stored = self._stored.get(key)
            if stored is None:
                raise Refusal(404, "NoSuchKey", "The specified key does not exist.")
            if stored.thaw is not None and self._now() >= stored.thaw.expires_at:
                stored = self._stored[key] = replace(stored, thaw=None)
            return stored

    def read(self, key: str, version_id: str | None = None) -> Stored:
        """To be sent to somebody: refused while it is archived and not restored."""
        stored = self.find(key, version_id)
        if not self._readable(stored):
            raise Refusal(403, "InvalidObjectState", "The operation is not valid for the object's storage class")
        return stored

    def put(self, key: str, body: bytes, storage_class: str, sha256: str | None, *, only_new: bool) -> Stored:
        if storage_class not in CLASSES:
            raise Refusal(400, "InvalidStorageClass", "The storage class you specified is not valid")
        with self._lock:
            if only_new and key in self._stored:
                raise Refusal(412, "PreconditionFailed")
            version_id = secrets.token_hex(16) if self._versioned else None
            stored = self._stored[key] = Stored(body, storage_class, sha256, self._now(), version_id=version_id)
            if version_id is not None:
                self._versions[key, version_id] = stored
            return stored

    def copy(self, source: str, target: str, storage_class: str, *, hashed: bool) -> Stored:
        found = self.find(source)
        if not self._readable(found):
            raise Refusal(403, "ObjectNotInActiveTierError", "The source object of the COPY is not in the active tier")
        if source == target and storage_class == found.storage_class:
            raise Refusal(400, "InvalidRequest", "This copy request is illegal: it changes nothing.")
        sha256 = base64.b64encode(hashlib.sha256(found.body).digest()).decode() if hashed else found.sha256
        return self.put(target, found.body, storage_class, sha256, only_new=False)

    def restore(self, key: str, days: int, tier: str) -> int:
        """The status that Amazon answers with."""
        with self._lock:
            stored, now = self.find(key), self._now()
            if not stored.archived:
                raise Refusal(
                    403, "InvalidObjectState", "Restore is not allowed for the object's current storage class"
                )
            takes = _TAKES.get((stored.storage_class, tier))
            if takes is None:
                raise Refusal(400, "InvalidArgument", f"{tier} is not available for {stored.storage_class}")
            if days < 1:
                raise Refusal(400, "InvalidArgument", "Days must be positive")
            if stored.thaw is not None and now < stored.thaw.ready_at:
                raise Refusal(409, "RestoreAlreadyInProgress", "Object restore is already in progress")
            prolonged = stored.thaw is not None
            ready_at = stored.thaw.ready_at if stored.thaw is not None else now + takes
            thaw = Thaw(ready_at, _next_midnight(max(now, ready_at) + timedelta(days=days)))
            self._stored[key] = replace(stored, thaw=thaw)
            return 200 if prolonged else 202

    def restore_header(self, stored: Stored) -> str | None:
        if stored.thaw is None:
            return None
        if self._now() < stored.thaw.ready_at:
            return 'ongoing-request="true"'
        return f'ongoing-request="false", expiry-date="{format_datetime(stored.thaw.expires_at, usegmt=True)}"'

    def delete(self, key: str, version_id: str | None = None) -> bool:
        """Whether it only hid the object."""
        with self._lock:
            if version_id is not None:
                self._versions.pop((key, version_id), None)
                left = [stored for (name, _), stored in self._versions.items() if name == key]
                if key in self._stored and self._stored[key].version_id == version_id:
                    self._stored.pop(key)
                    if left:
                        self._stored[key] = left[-1]
                return False
            self._stored.pop(key, None)
            return self._versioned

    def versions(self, prefix: str) -> list[tuple[str, str]]:
        """The newest first."""
        with self._lock:
            return [each for each in reversed(self._versions) if each[0].startswith(prefix)]

    def names(self, prefix: str) -> list[str]:
        with self._lock:
            return sorted(key for key in self._stored if key.startswith(prefix))

    def _readable(self, stored: Stored) -> bool:
        return not stored.archived or (stored.thaw is not None and self._now() >= stored.thaw.ready_at)


def _next_midnight(moment: datetime) -> datetime:
    """Amazon passes the end of a restored copy up to the next midnight, UTC."""
    return (moment + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)

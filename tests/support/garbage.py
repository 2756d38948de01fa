"""What a collector and a sweep find in a store: chunks that nobody needs, and objects that no row knows."""

from __future__ import annotations

import os
import secrets
import time

from holdfast_service.copies.predicates import object_key
from holdfast_service.db.tables.core import Copy
from holdfast_service.stores.base import ObjectKey, ObjectMissing
from tests.support.rank import Job, Save, digest_of
from tests.support.service import RunningService


def given_up(job: Job, data: bytes) -> Save:
    """Uploaded and verified for a checkpoint that was then given up."""
    save = job.begin(999)
    save.upload(0, [data])
    save.abort()
    return save


def bytes_of(service: RunningService, copy: Copy) -> bytes | None:
    """What its store has under its key."""
    store = service.context.store_of(copy.store_id)
    assert store is not None
    try:
        return b"".join(store.open_read(object_key(copy.project_id, copy.stored_digest, copy)))
    except ObjectMissing:
        return None


def orphan(service: RunningService, project_id: str, *, old: bool = True) -> ObjectKey:
    """An object that no row knows."""
    data = secrets.token_bytes(50)
    key = ObjectKey(project_id, digest_of(data), secrets.token_hex(16))
    service.context.store.put_bytes(key, data)
    if old:
        settings = service.context.settings
        age_it(service, key, settings.ticket_seconds + settings.longest_upload_seconds + 5)
    return key


def age_it(service: RunningService, key: ObjectKey, seconds: float) -> None:
    moment = time.time() - seconds
    os.utime(service.context.store.object_path(key), (moment, moment))


def listed(service: RunningService, project_id: str) -> set[ObjectKey]:
    return {each.key for each in service.context.store.list_objects(project_id)}

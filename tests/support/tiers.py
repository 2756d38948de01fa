"""A service with something cold: a bucket with archive classes, or a folder with a second one. The test moves one clock
for the catalog and the archives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select

from holdfast_service.collect.controller import reconcile as collect_tick
from holdfast_service.copies.predicates import object_key
from holdfast_service.db.tables.core import Chunk, Copy
from holdfast_service.stores.base import ObjectKey
from holdfast_service.tiers.controller import TiersReport, reconcile
from tests.support.rank import Job, answer, digest_of, redeem
from tests.support.s3_fake.server import S3Fake
from tests.support.service import RunningService

HOUR = 3600
DAY = 24 * HOUR
READ_LEASE_SECONDS = 6 * HOUR

# Where the database plays no part: one is enough.
IN_A_FOLDER = pytest.mark.parametrize(("kind", "database_url"), [("folder", "sqlite")], indirect=["database_url"])
IN_A_BUCKET = pytest.mark.parametrize(("kind", "database_url"), [("bucket", "sqlite")], indirect=["database_url"])


class Cold:
    """`rule` is the target of the policies; `fake` is None where a folder is the cold place."""

    def __init__(self, service: RunningService, move_clock: Callable[[float], None], fake: S3Fake | None) -> None:
        self.service = service
        self.context = service.context
        self.http = service.http()
        self.fake = fake
        self.rule = {"to": "cold"} if fake is None else {"storage_class": "archive"}
        self._move_clock = move_clock

    def advance(self, seconds: float) -> None:
        self._move_clock(seconds)
        if self.fake is not None:
            self.fake.advance(seconds)

    def policy(self, *rules: dict[str, Any], run: str = "demo/gpt", **more: Any) -> None:
        """Without rules: to the cold place after 7 days."""
        project, _, name = run.partition("/")
        document = {"rules": list(rules) or [{"after": "7d"} | self.rule], **more}
        where = f"/v1/projects/{project}/runs/{name}/policies/tiers"
        answer(self.http.put(where, json={"document": document}))

    def round(self) -> TiersReport:
        report = reconcile(self.context)
        assert report.failed == 0, report.error
        return report

    def until_idle(self) -> None:
        while self.round().done:
            pass

    def collect(self) -> None:
        """After every lease and every URL has run out."""
        settings = self.context.settings
        self.advance(settings.ticket_seconds + settings.longest_upload_seconds + settings.lease_seconds + 1)
        for _ in range(2):
            collect_tick(self.context)

    def aged(self, steps: int = 3, *, job: Job | None = None) -> Job:
        """A run whose steps are older than the policy's week: all but the two newest are due."""
        job = job or Job(self.http)
        for step in range(1, steps + 1):
            job.save(step)
        self.policy(run=job.run)
        self.advance(8 * DAY)
        return job

    def cooled(self, steps: int = 3, *, job: Job | None = None) -> Job:
        """The same, and they are cold; the two newest are hot."""
        job = self.aged(steps, job=job)
        self.round()
        return job

    def view(self, step: int, run: str = "demo/gpt") -> dict[str, Any]:
        project, _, name = run.partition("/")
        view: dict[str, Any] = answer(self.http.get(f"/v1/projects/{project}/runs/{name}/checkpoints/{step}"))
        return view

    def tier(self, step: int, run: str = "demo/gpt") -> str:
        return str(self.view(step, run)["tier"])

    def thaw(self, step: int, **request: Any) -> dict[str, Any]:
        reply: dict[str, Any] = answer(self.http.post(f"/v1/checkpoints/{self.view(step)['id']}/thaw", json=request))
        return reply

    def thaw_status(self, step: int) -> dict[str, Any]:
        reply: dict[str, Any] = answer(self.http.get(f"/v1/checkpoints/{self.view(step)['id']}/thaw"))
        return reply

    def thawed(self, step: int, **request: Any) -> dict[str, Any]:
        """The whole way, as long as it takes."""
        self.thaw(step, **request)
        for _ in range(60):
            self.round()
            if self.tier(step) == "hot":
                return self.thaw_status(step)
            self.advance(4500)
        raise AssertionError("it never thawed")

    def tickets(self, step: int, *chunks: bytes) -> list[dict[str, Any]]:
        digests = [digest_of(data) for data in chunks]
        reply = answer(self.http.post(f"/v1/checkpoints/{self.view(step)['id']}/reads", json={"digests": digests}))
        found: list[dict[str, Any]] = reply["chunks"]
        return found

    def read(self, ticket: dict[str, Any]) -> bytes:
        return redeem(self.http, ticket).raise_for_status().content

    def content(self, step: int, data: bytes) -> bytes:
        """What a reader gets of the chunk now."""
        (ticket,) = self.tickets(step, data)
        return self.read(ticket)

    def copies(self, data: bytes) -> list[tuple[str, str | None]]:
        """(state, where it is) of each copy that there is, oldest first."""
        roles = {attached.store_id: attached.role.value for attached in self.context.stores}
        with self.context.database.read() as session:
            rows = session.scalars(
                select(Copy)
                .join(Chunk, Chunk.id == Copy.chunk_id)
                .where(Chunk.digest == digest_of(data), Copy.state != "gone")
                .order_by(Copy.id)
            ).all()
        return [(row.state, row.storage_class or roles[row.store_id]) for row in rows]

    def keys(self, data: bytes) -> list[ObjectKey]:
        with self.context.database.read() as session:
            rows = session.scalars(
                select(Copy).join(Chunk, Chunk.id == Copy.chunk_id).where(Chunk.digest == digest_of(data))
            ).all()
        return [object_key(row.project_id, digest_of(data), row) for row in rows]

    def stored(self, project_id: str) -> set[str]:
        """Every object of the project, in any store."""
        return {
            listed.key.path for attached in self.context.stores for listed in attached.store.list_objects(project_id)
        }


def weights(step: int, run: str = "demo/gpt", attempt: int = 1) -> bytes:
    """What Job.save writes as its first chunk."""
    return f"{run} {attempt} {step} 0".encode()

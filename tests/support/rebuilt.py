"""Dropping a catalog and getting it back from the bucket: the steps that the tests of a rebuild share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from pydantic import SecretStr

import holdfast_service.records.controller
from holdfast_protocol.stores import CatalogCheck
from holdfast_service.attached_stores.epoch import claim_store
from holdfast_service.audit.record import Actor
from holdfast_service.catalog_check.check import check_catalog
from holdfast_service.context import ServiceContext
from holdfast_service.db.engine import Database
from holdfast_service.rebuild.report import RebuildReport
from holdfast_service.rebuild.run import rebuild
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import Store
from holdfast_service.stores.registry import open_store
from tests.support.rank import digest_of, redeem
from tests.support.service import RunningService, running_service

SIGNING_KEY = b"k" * 32


def record_all(context: ServiceContext) -> int:
    """Passes of the outbox until nothing is due; how many versions were written."""
    written = 0
    while True:
        report = holdfast_service.records.controller.reconcile(context)
        assert report.failed == 0, report.error
        if report.done == 0:
            return written
        written += report.done


def rebuild_into(url: str, *store_urls: str, older: Database | None = None) -> RebuildReport:
    opened: list[tuple[str, Store]] = [(each, open_store(each, SIGNING_KEY)) for each in store_urls]
    database = Database(url)
    try:
        return rebuild(database, opened, older=older)
    finally:
        database.dispose()


@contextmanager
def rebuilt_service(
    settings: ServiceSettings, url: str, *store_urls: str, older: Database | None = None
) -> Iterator[tuple[RunningService, RebuildReport]]:
    """A service on a catalog that was rebuilt from the settings' own store, or from these; and from the database that
    is replaced."""
    report = rebuild_into(url, *(store_urls or (settings.store_url,)), older=older)
    with running_service(settings.model_copy(update={"database_url": SecretStr(url)})) as service:
        yield service, report


def read_all(http: httpx.Client, checkpoint_id: str, chunks: Sequence[bytes]) -> bool:
    """Whether the checkpoint gives exactly these bytes to a client."""
    digests = sorted({digest_of(data) for data in chunks})
    reply = http.post(f"/v1/checkpoints/{checkpoint_id}/reads", json={"digests": digests})
    reply.raise_for_status()
    found = {each["digest"]: _bytes_of(http, each) for each in reply.json()["chunks"]}
    return found == {digest_of(data): data for data in chunks}


def _bytes_of(http: httpx.Client, ticket: dict[str, Any]) -> bytes:
    if ticket["kind"] == "file":
        return Path(ticket["path"]).read_bytes()
    return redeem(http, ticket).raise_for_status().content


def check_all(context: ServiceContext, *, deep: bool = False, confirm_missing: bool = False) -> CatalogCheck:
    return check_catalog(context, None, Actor.at_the_database(), deep=deep, confirm_missing=confirm_missing)


def claim_all(context: ServiceContext, *, accept_loss: bool = False) -> None:
    for attached in context.stores:
        claim_store(context, attached, Actor.at_the_database(), accept_loss=accept_loss)

"""What every operation needs, made once at the start and handed down explicitly: no globals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from holdfast_service.catalog.notifier import CommitNotifier
from holdfast_service.database import Database
from holdfast_service.settings import ServiceSettings
from holdfast_service.store_watch import StoreWatch
from holdfast_service.stores.base import Store


@dataclass(frozen=True)
class ServiceContext:
    """`epoch` is half of every fencing token; `store_id` is the catalog's row of `store`; `signing_key` signs the
    service's own URLs."""

    settings: ServiceSettings
    database: Database
    store: Store
    store_id: int
    store_watch: StoreWatch
    catalog_id: str
    epoch: int
    signing_key: bytes = field(repr=False)
    notifier: CommitNotifier


def _of(request: Request) -> ServiceContext:
    context: ServiceContext = request.app.state.context
    return context


Context = Annotated[ServiceContext, Depends(_of)]

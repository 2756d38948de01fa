"""`/v1/objects/...`: chunks through the service, for clients of a posix store that do not see its mount.

The signed URL is the authorization. `async def`, because bytes stream through: memory stays at about a MiB for each
transfer, and no file operation runs on the event loop. Nothing of a refused body is left behind. A transfer takes a
connection for as long as its client likes, so each project may have so many at a time.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from holdfast_protocol.problems import ProblemCode
from holdfast_service.errors import ProblemError
from holdfast_service.stores.base import ObjectMismatch
from holdfast_service.stores.posix.posix_store import PosixStore
from holdfast_service.stores.posix.signed_urls import OBJECTS_PATH, Grant, SignatureInvalid, TicketExpired, UrlSigner

_PIECE_BYTES = 1024 * 1024
_RETRY_AFTER_SECONDS = 2
IDLE_SECONDS = 60.0
"""A body of which nothing comes for so long is given up: twice as long as a client waits for one send."""


@dataclass(frozen=True)
class TransferLimits:
    """`most_of_project`: uploads and downloads of one project at a time, in this process."""

    longest_upload_seconds: float = 3600.0
    most_of_project: int = 625


class _Transfers:
    """How many each project has under way. Thread-safe: there may be several event loops."""

    def __init__(self, limits: TransferLimits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._of_project: Counter[str] = Counter()

    @contextmanager
    def one_more(self, project_id: str) -> Iterator[None]:
        """Raises `rate_limited`."""
        with self._lock:
            count = self._of_project[project_id]
            if count >= self.limits.most_of_project:
                raise ProblemError(
                    ProblemCode.RATE_LIMITED,
                    f"{count} transfers of this project are under way through this process of the service, as many as "
                    f"it bears of one. Try again in {_RETRY_AFTER_SECONDS} s; clients that see the store's mount need "
                    "none.",
                    retry_after_seconds=_RETRY_AFTER_SECONDS,
                )
            self._of_project[project_id] = count + 1
        try:
            yield
        finally:
            with self._lock:
                self._of_project[project_id] -= 1
                if not self._of_project[project_id]:
                    del self._of_project[project_id]


class _ObjectFile(FileResponse):
    """Sends an open file and closes it: by its name another file could be found meanwhile."""

    chunk_size = _PIECE_BYTES

    def __init__(self, descriptor: int, project_id: str, transfers: _Transfers) -> None:
        self._descriptor = descriptor
        self._project_id = project_id
        self._transfers = transfers
        super().__init__(
            f"/dev/fd/{descriptor}", stat_result=os.fstat(descriptor), media_type="application/octet-stream"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises `rate_limited` before anything is sent."""
        try:
            with self._transfers.one_more(self._project_id):
                await super().__call__(scope, receive, send)
        finally:
            os.close(self._descriptor)


@dataclass(frozen=True)
class SignedStore:
    """A posix store with the key that it was opened with."""

    store: PosixStore
    signing_key: bytes


# The signed URL is the authorization.
_OPEN: dict[str, Any] = {"security": []}


def object_router(
    stores: Sequence[SignedStore],
    limits: TransferLimits = TransferLimits(),
    route_class: type[APIRoute] = APIRoute,
) -> APIRouter:
    """The routes that the tickets of these stores point at. A StoreError or ProblemError is left to the application's
    handlers. `route_class`: that of the application's routes."""
    signers = [(each.store, UrlSigner(each.signing_key)) for each in stores]
    transfers = _Transfers(limits)
    router = APIRouter(route_class=route_class, tags=["objects"])

    @router.put(
        OBJECTS_PATH + "/{payload}", status_code=201, openapi_extra=_OPEN, summary="Upload one object with a signed URL"
    )
    async def put_object(payload: str, request: Request, signature: str = Query()) -> Response:
        store, grant = _granted(signers, "PUT", payload, signature)
        try:
            with transfers.one_more(grant.key.project_id):
                await _receive(store, grant, request, limits.longest_upload_seconds)
        except ClientDisconnect:
            return Response(status_code=400)  # the client has gone: no reader is left
        return Response(status_code=201)

    @router.get(
        OBJECTS_PATH + "/{payload}",
        response_class=Response,
        openapi_extra=_OPEN,
        summary="Read one object with a signed URL",
    )
    async def get_object(payload: str, signature: str = Query()) -> Response:
        store, grant = _granted(signers, "GET", payload, signature)
        return _ObjectFile(await asyncio.to_thread(store.open_object, grant.key), grant.key.project_id, transfers)

    return router


def _granted(
    signers: Sequence[tuple[PosixStore, UrlSigner]], method: str, payload: str, signature: str
) -> tuple[PosixStore, Grant]:
    for store, signer in signers:
        try:
            return store, signer.verify(method, payload, signature)
        except SignatureInvalid:
            continue
        except TicketExpired as error:
            raise ProblemError(ProblemCode.TICKET_EXPIRED, str(error)) from error
    raise ProblemError(ProblemCode.SIGNATURE_INVALID, str(SignatureInvalid()))


async def _receive(store: PosixStore, grant: Grant, request: Request, longest_seconds: float) -> None:
    """Raises ObjectMismatch, and `body_too_slow` for a body that takes longer or stops coming."""
    announced = request.headers.get("content-length")
    if announced != str(grant.stored_bytes):
        raise ObjectMismatch(
            f"the URL is for {grant.stored_bytes} bytes and the request announces {announced or 'none'}"
        )
    staged = await asyncio.to_thread(store.stage)
    try:
        async for piece in _pieces(_in_time(request.stream(), longest_seconds)):
            await asyncio.to_thread(staged.write, piece)
        if (staged.bytes, staged.sha256) != (grant.stored_bytes, grant.stored_sha256):
            raise ObjectMismatch("the SHA-256 of the body is not the one that was announced; send the chunk again")
        await asyncio.to_thread(store.publish_staged, staged, grant.key)
    finally:
        await asyncio.shield(asyncio.to_thread(staged.discard))


async def _in_time(body: AsyncIterator[bytes], longest_seconds: float) -> AsyncIterator[bytes]:
    """The same parts. The collector relies on the end: what it has deleted must not arrive afterwards (rule
    late-put-window)."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + longest_seconds
    come = 0
    while True:
        try:
            async with asyncio.timeout_at(min(loop.time() + IDLE_SECONDS, ends)):
                part = await anext(body, None)
        except TimeoutError:
            raise ProblemError(
                ProblemCode.BODY_TOO_SLOW,
                f"Only {come} bytes of the chunk came in time. Send it again, on a faster or less busy network.",
            ) from None
        if part is None:
            return
        come += len(part)
        yield part


async def _pieces(body: AsyncIterator[bytes]) -> AsyncIterator[bytearray]:
    """The body in larger pieces: a hop to a thread for each 64 KiB would cost more than the write."""
    gathered = bytearray()
    async for part in body:
        gathered += part
        if len(gathered) >= _PIECE_BYTES:
            yield gathered
            gathered = bytearray()
    yield gathered

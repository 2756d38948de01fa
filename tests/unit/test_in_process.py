"""The transport that the service's tests call the application with behaves as a connection to a server does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from tests.support.in_process import in_process

TOGETHER = 8


def application() -> FastAPI:
    app, met = FastAPI(), threading.Barrier(TOGETHER)

    @app.post("/meet")
    def meet(body: dict[str, int]) -> int:
        met.wait(30)
        return body["number"]

    @app.get("/half")
    def half() -> StreamingResponse:
        def parts() -> Iterator[bytes]:
            yield b"half"
            raise OSError("the disk is gone")

        return StreamingResponse(parts())

    @app.get("/short")
    def short() -> StreamingResponse:
        return StreamingResponse(iter([b"half"]), headers={"Content-Length": "8"})

    @app.get("/never")
    async def never() -> None:
        await asyncio.Event().wait()

    return app


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with (
        in_process(application()) as transport,
        httpx.Client(base_url="http://127.0.0.1", transport=transport, timeout=60) as http,
    ):
        yield http


def test_requests_of_several_threads_run_at_the_same_time(http: httpx.Client) -> None:
    with ThreadPoolExecutor(TOGETHER) as threads:
        replies = list(threads.map(lambda number: http.post("/meet", json={"number": number}), range(TOGETHER)))
    assert [reply.json() for reply in replies] == list(range(TOGETHER))


@pytest.mark.parametrize("path", ["/half", "/short"])
def test_a_reply_that_is_not_whole_is_an_error(http: httpx.Client, path: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        http.get(path)


def test_who_waits_longer_than_the_timeout_is_told_so(http: httpx.Client) -> None:
    with pytest.raises(httpx.ReadTimeout):
        http.get("/never", timeout=0.05)
    assert http.get("/missing").status_code == 404

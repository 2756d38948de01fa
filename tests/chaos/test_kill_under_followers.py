"""A thousand followers of the event stream on two services, one of which ends by kill -9 while checkpoints are
committed: they go on at the other one, and none of them misses an event or hears one twice (rule events-in-order)."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from holdfast_protocol.base import PROTOCOL_HEADER, PROTOCOL_VERSION
from tests.support.databases import PostgresCatalogs
from tests.support.rank import Job
from tests.support.serve import ServedHoldfast, holdfast_serve

FOLLOWERS = 1000
CHECKPOINTS = 60
WITHIN_SECONDS = 480
TOKEN = f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}"
HEADERS = {"Authorization": f"Bearer {TOKEN}", PROTOCOL_HEADER: PROTOCOL_VERSION}


@pytest.fixture
def services(postgres_catalogs: PostgresCatalogs, tmp_path: Path) -> Iterator[list[ServedHoldfast]]:
    url = postgres_catalogs.new()
    settings = {
        "HOLDFAST_DATABASE_URL": url,
        "HOLDFAST_BOOTSTRAP_TOKEN": TOKEN,
        "HOLDFAST_STORE": f"posix://{tmp_path / 'store'}",
    }
    with ExitStack() as started:
        both = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            both.append(started.enter_context(holdfast_serve(tmp_path / name, other_settings=settings)))
        yield both
    postgres_catalogs.give_back(url)


class Follower:
    """As a browser does it: one connection, and after it has broken the next one with the last id."""

    def __init__(self, number: int, urls: list[str]) -> None:
        self._urls = urls
        self._turn = number
        self._position = "1-0"
        self.steps: list[int] = []

    async def follow(self, last_step: int) -> None:
        while last_step not in self.steps:
            try:
                await self._connection(last_step)
            except (OSError, asyncio.IncompleteReadError):
                self._turn += 1

    async def _connection(self, last_step: int) -> None:
        server = urlsplit(self._urls[self._turn % len(self._urls)])
        reader, writer = await asyncio.open_connection(server.hostname, server.port)
        try:
            head = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
            head += f"Host: {server.netloc}\r\nLast-Event-ID: {self._position}\r\n\r\n"
            writer.write(f"GET /v1/events/stream?type=checkpoint.committed HTTP/1.1\r\n{head}".encode())
            status = (await reader.readuntil(b"\r\n\r\n")).decode()
            if status.startswith(("HTTP/1.1 429 ", "HTTP/1.1 503 ")):  # all come at once
                await asyncio.sleep(int(status.lower().partition("retry-after: ")[2].partition("\r")[0]))
                return
            assert status.startswith("HTTP/1.1 200 "), status
            while last_step not in self.steps:
                self._hear(await self._piece(reader))
        finally:
            writer.close()

    async def _piece(self, reader: asyncio.StreamReader) -> str:
        """One chunk of the body: whole messages."""
        size = int(await reader.readuntil(b"\r\n"), 16)
        if not size:
            raise ConnectionResetError("the service has ended the stream")
        return (await reader.readexactly(size + 2))[:-2].decode()

    def _hear(self, messages: str) -> None:
        for line in messages.splitlines():
            if line.startswith("id: "):
                self._position = line.removeprefix("id: ")
            elif line.startswith("data: "):
                self.steps.append(int(line.partition('"step":')[2].partition(",")[0]))


@pytest.mark.timeout(600)
@pytest.mark.rule("events-in-order")
def test_none_misses_an_event_when_its_service_is_killed(services: list[ServedHoldfast]) -> None:
    stays, dies = services
    followers = [Follower(number, [stays.url, dies.url]) for number in range(FOLLOWERS)]

    def commit() -> None:
        with httpx.Client(base_url=stays.url, headers=HEADERS, timeout=300) as http:
            job = Job(http)
            for step in range(1, CHECKPOINTS + 1):
                job.save(step)
                if step == CHECKPOINTS // 2:
                    dies.process.kill9()

    async def all_follow() -> None:
        async with asyncio.timeout(WITHIN_SECONDS), asyncio.TaskGroup() as group:
            for follower in followers:
                group.create_task(follower.follow(CHECKPOINTS))
            group.create_task(asyncio.to_thread(commit))

    asyncio.run(all_follow())
    heard = Counter(tuple(follower.steps) for follower in followers)
    assert heard == {tuple(range(1, CHECKPOINTS + 1)): FOLLOWERS}

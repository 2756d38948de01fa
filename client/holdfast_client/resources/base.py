"""The base of each resource, with the one transport; and pages -> all items."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import TypeVar

from holdfast_client.errors import AlreadyMade
from holdfast_client.transport import Transport
from holdfast_protocol.base import Page

Item = TypeVar("Item")
MadeT = TypeVar("MadeT")


class Resource:
    """The calls of one noun of the service. Resources differ only in route, request and reply."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def _whole(self, route: str, page: type[Page[Item]]) -> list[Item]:
        """Every item of a short list."""
        return list(all_items(lambda cursor: self.transport.call("GET", route, page, params={"cursor": cursor})))


# A plan of a run of 100,000 checkpoints takes the service many seconds.
PLANS_SECONDS = 300.0
# How often a thing with a secret is made again because its reply was lost.
_MAKES = 4


def once() -> dict[str, str]:
    """The header of a call that makes a thing: however often the transport sends it, one thing is made."""
    return {"Idempotency-Key": uuid.uuid4().hex}


def if_match(etag: str | None) -> dict[str, str]:
    """The header of a call that replaces or deletes the version that `etag` was read from."""
    return {} if etag is None else {"If-Match": etag}


def made_once(make: Callable[[], MadeT], undo: Callable[[str], object]) -> MadeT:
    """Returns `make()`. If an earlier try made the thing and its reply was lost, the secret in it is lost too: that
    thing is undone, and another made. Each `make` has a key of its own."""
    for _ in range(_MAKES - 1):
        try:
            return make()
        except AlreadyMade as error:
            undo(str(error.context["id"]))
    return make()


def all_items(read_page: Callable[[str | None], Page[Item]]) -> Iterator[Item]:
    """Calls `read_page(cursor)` until there is no next page."""
    cursor: str | None = None
    while True:
        page = read_page(cursor)
        yield from page.items
        cursor = page.next_cursor
        if cursor is None:
            return

"""What each resource stands on: the one transport; and from one page to all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from holdfast_client.transport import Transport
from holdfast_protocol.base import Page


class Resource:
    """The calls of one noun of the service. They differ in route, request and reply, and in nothing else."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport


Item = TypeVar("Item")

# A plan of a run of 100,000 checkpoints takes the service many seconds.
PLANS_SECONDS = 300.0


def all_items(read_page: Callable[[str | None], Page[Item]]) -> Iterator[Item]:
    """Calls `read_page(cursor)` until there is no next page."""
    cursor: str | None = None
    while True:
        page = read_page(cursor)
        yield from page.items
        cursor = page.next_cursor
        if cursor is None:
            return

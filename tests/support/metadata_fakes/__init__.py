"""The metadata servers of AWS, GCP and Azure on loopback, as strict as the real ones: what lacks its header, its token
or its version gets what the real one answers. Each is `with served(FakeAws()) as (cloud, url)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from tests.support.metadata_fakes.aws import FakeAws
from tests.support.metadata_fakes.azure import FakeAzure
from tests.support.metadata_fakes.gcp import FakeGcp
from tests.support.scripted_http import Reply, Seen, scripted

__all__ = ["FakeAws", "FakeAzure", "FakeGcp", "served"]


class FakeCloud(Protocol):
    def answer(self, seen: Seen) -> Reply: ...

    def end(self) -> None: ...


C = TypeVar("C", bound=FakeCloud)


@contextmanager
def served(cloud: C) -> Iterator[tuple[C, str]]:
    """The fake, and its base URL."""
    with scripted(cloud.answer) as server:
        try:
            yield cloud, server.url
        finally:
            cloud.end()

"""Copies in a second store: how far behind it is, and drills. See holdfast_protocol.copies."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast_client.operations.base import Operations
from holdfast_client.operations.pages import all_items
from holdfast_client.transport import path
from holdfast_protocol.base import Page
from holdfast_protocol.copies import RunCopies, StartDrill
from holdfast_protocol.operations import OperationView
from holdfast_protocol.states import StoreRole


class CopyOperations(Operations):
    def copies(self, project: str, run: str) -> RunCopies:
        """How far the second store is behind with a run: in seconds, steps and bytes."""
        return self.transport.call("GET", path("projects", project, "runs", run, "copies"), RunCopies)

    def copies_of_project(
        self, project: str, *, cursor: str | None = None, limit: int | None = None
    ) -> Page[RunCopies]:
        """The same for one page of a project's runs, by name."""
        params = {"cursor": cursor, "limit": limit}
        return self.transport.call("GET", path("projects", project, "copies"), Page[RunCopies], params=params)

    def all_copies(self, project: str) -> Iterator[RunCopies]:
        return all_items(lambda cursor: self.copies_of_project(project, cursor=cursor))

    def drill(
        self, project: str, run: str, selector: str = "latest", store: StoreRole = StoreRole.SECOND
    ) -> OperationView:
        """Has a checkpoint restored from one store alone, every byte verified. `wait_operation` gives the result, a
        DrillResult."""
        route = path("projects", project, "runs", run, "drills")
        return self.transport.call("POST", route, OperationView, body=StartDrill(selector=selector, store=store))

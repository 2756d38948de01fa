"""Scrub on demand, and what a bad chunk means. See holdfast_protocol.scrub."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast_client.operations.base import Operations
from holdfast_client.operations.pages import all_items
from holdfast_client.transport import path
from holdfast_protocol.base import Page
from holdfast_protocol.operations import OperationView
from holdfast_protocol.scrub import BadCopy, Impact, ScrubMode, StartScrub


class ScrubOperations(Operations):
    def scrub_run(self, project: str, run: str, mode: ScrubMode = ScrubMode.READ) -> OperationView:
        """Has every copy of the run's chunks read again. `wait_operation` gives the result, a ScrubResult."""
        route = path("projects", project, "runs", run, "scrub")
        return self.transport.call("POST", route, OperationView, body=StartScrub(mode=mode))

    def scrub_checkpoint(self, checkpoint_id: str, mode: ScrubMode = ScrubMode.READ) -> OperationView:
        """The same of one checkpoint's chunks."""
        route = path("checkpoints", checkpoint_id, "scrub")
        return self.transport.call("POST", route, OperationView, body=StartScrub(mode=mode))

    def impact_of_chunk(self, digest: str) -> Impact:
        """Which checkpoints and runs need this chunk, in all projects that the token sees."""
        return self.transport.call("GET", path("chunks", digest, "impact"), Impact)

    def impact_of_checkpoint(self, checkpoint_id: str) -> Impact:
        """The bad chunks of this checkpoint, and who else needs them."""
        return self.transport.call("GET", path("checkpoints", checkpoint_id, "impact"), Impact)

    def bad_copies(self, project: str, *, cursor: str | None = None, limit: int | None = None) -> Page[BadCopy]:
        """One page of the copies that are bad or suspect."""
        return self.transport.call(
            "GET", path("projects", project, "bad-copies"), Page[BadCopy], params={"cursor": cursor, "limit": limit}
        )

    def all_bad_copies(self, project: str) -> Iterator[BadCopy]:
        return all_items(lambda cursor: self.bad_copies(project, cursor=cursor))

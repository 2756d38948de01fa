"""Where a run's time went. See holdfast_protocol.goodput."""

from __future__ import annotations

from holdfast_client.operations.base import Operations
from holdfast_client.transport import path
from holdfast_protocol.goodput import Goodput


class GoodputOperations(Operations):
    def goodput(self, project: str, run: str) -> Goodput:
        return self.transport.call("GET", path("projects", project, "runs", run, "goodput"), Goodput)

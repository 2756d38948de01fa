"""What the history of a run tells: goodput, and how often to save."""

from __future__ import annotations

from holdfast_client.resources.base import Operations
from holdfast_client.transport import path
from holdfast_protocol.runs import AdviceView, Goodput

# Where a run's time went. See holdfast_protocol.runs.


class GoodputOperations(Operations):
    def goodput(self, project: str, run: str) -> Goodput:
        return self.transport.call("GET", path("projects", project, "runs", run, "goodput"), Goodput)


# How often a run should save. See holdfast_protocol.runs.


class AdviceOperations(Operations):
    def advice(self, project: str, run: str) -> AdviceView:
        """How often the run should save by what was measured, and why."""
        return self.transport.call("GET", path("projects", project, "runs", run, "advice"), AdviceView)

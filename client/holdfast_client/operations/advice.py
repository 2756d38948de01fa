"""How often a run should save. See holdfast_protocol.advice."""

from __future__ import annotations

from holdfast_client.operations.base import Operations
from holdfast_client.transport import path
from holdfast_protocol.advice import AdviceView


class AdviceOperations(Operations):
    def advice(self, project: str, run: str) -> AdviceView:
        """How often the run should save by what was measured, and why."""
        return self.transport.call("GET", path("projects", project, "runs", run, "advice"), AdviceView)

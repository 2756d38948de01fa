"""Insights from a run's history: goodput, and how often to save."""

from __future__ import annotations

from holdfast_client.resources.base import Resource
from holdfast_client.transport import path
from holdfast_protocol.runs import AdviceView, Goodput


class Insights(Resource):
    """Goodput, and how often to save."""

    def goodput(self, project: str, run: str) -> Goodput:
        return self.transport.call("GET", path("projects", project, "runs", run, "goodput"), Goodput)

    def save_interval(self, project: str, run: str) -> AdviceView:
        """How often the run should save by its measurements, and why."""
        return self.transport.call("GET", path("projects", project, "runs", run, "advice"), AdviceView)

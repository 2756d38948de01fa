"""Insights from a run's history: goodput, how often to save, and what was hour by hour."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TypeVar

from holdfast_client.resources.base import Resource, all_items
from holdfast_client.transport import path
from holdfast_protocol.base import Page
from holdfast_protocol.runs import AdviceView, Goodput
from holdfast_protocol.usage import ProjectSample, RunSample, SampledEvery

_SampleT = TypeVar("_SampleT", ProjectSample, RunSample)


class Insights(Resource):
    """Goodput, how often to save, and hourly samples."""

    def goodput(self, project: str, run: str) -> Goodput:
        return self.transport.call("GET", path("projects", project, "runs", run, "goodput"), Goodput)

    def save_interval(self, project: str, run: str) -> AdviceView:
        """How often the run should save by its measurements, and why."""
        return self.transport.call("GET", path("projects", project, "runs", run, "advice"), AdviceView)

    def project_samples(
        self,
        project: str,
        *,
        every: SampledEvery = SampledEvery.HOUR,
        since: datetime | None = None,
        until: datetime | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[ProjectSample]:
        """One page of what a project held, cost and made of its time, the newest first. `since` is inclusive, `until`
        is not; both are compared with the begin of an hour."""
        route = path("projects", project, "samples")
        return self._samples(route, Page[ProjectSample], every, since, until, cursor, limit)

    def all_project_samples(
        self,
        project: str,
        *,
        every: SampledEvery = SampledEvery.HOUR,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Iterator[ProjectSample]:
        return all_items(
            lambda cursor: self.project_samples(project, every=every, since=since, until=until, cursor=cursor)
        )

    def run_samples(
        self,
        project: str,
        run: str,
        *,
        every: SampledEvery = SampledEvery.HOUR,
        since: datetime | None = None,
        until: datetime | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[RunSample]:
        """The same of a run, of the hours at whose end it was live."""
        route = path("projects", project, "runs", run, "samples")
        return self._samples(route, Page[RunSample], every, since, until, cursor, limit)

    def all_run_samples(
        self,
        project: str,
        run: str,
        *,
        every: SampledEvery = SampledEvery.HOUR,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Iterator[RunSample]:
        return all_items(
            lambda cursor: self.run_samples(project, run, every=every, since=since, until=until, cursor=cursor)
        )

    def _samples(  # noqa: PLR0917  (the parts of one call)
        self,
        route: str,
        page: type[Page[_SampleT]],
        every: SampledEvery,
        since: datetime | None,
        until: datetime | None,
        cursor: str | None,
        limit: int | None,
    ) -> Page[_SampleT]:
        params = {
            "every": every.value,
            "since": None if since is None else since.isoformat(),
            "until": None if until is None else until.isoformat(),
            "cursor": cursor,
            "limit": limit,
        }
        return self.transport.call("GET", route, page, params=params)

"""The stores: copies, scrubs, tiers, garbage, usage, samples."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast_client.resources.base import Operations, all_items
from holdfast_client.transport import path
from holdfast_protocol.base import Page
from holdfast_protocol.copies import BadCopy, Impact, RunCopies, ScrubMode, StartDrill, StartScrub
from holdfast_protocol.service import OperationView
from holdfast_protocol.states import StoreRole
from holdfast_protocol.stores import (
    CheckCatalog,
    ClaimStore,
    CollectionPlan,
    ConfirmCommits,
    DoubtView,
    MakeSample,
    SampleChecked,
    SampleOffer,
    StartSweep,
    StoreClock,
    StoreView,
    SweepReport,
)
from holdfast_protocol.tiers import RequestThaw, ThawSpeed, ThawView, TierPlan
from holdfast_protocol.usage import CostForecast, CostView, ForecastCost, PriceList, PriceListView, UsageView

# The attached stores, their comparison with the catalog, and their claim. See holdfast_protocol.stores.


class StoreOperations(Operations):
    def store_clocks(self) -> list[StoreClock]:
        return self.transport.call("GET", path("store-clocks"), Page[StoreClock]).items

    def stores(self) -> list[StoreView]:
        return self.transport.call("GET", path("stores"), Page[StoreView]).items

    def check_catalog(self, request: CheckCatalog) -> OperationView:
        """Started, or under way already; its result is a CatalogCheck. See wait_operation."""
        return self.transport.call("POST", path("catalog", "check"), OperationView, body=request)

    def doubts(self) -> list[DoubtView]:
        """What a rebuild of the catalog could not know, and nobody has confirmed since."""
        return self.transport.call("GET", path("catalog", "doubts"), Page[DoubtView]).items

    def confirm_commits(self, request: ConfirmCommits) -> DoubtView:
        return self.transport.call("POST", path("catalog", "confirm"), DoubtView, body=request)

    def claim_store(self, role: StoreRole, request: ClaimStore) -> StoreView:
        return self.transport.call("POST", path("stores", role.value, "claim"), StoreView, body=request)


# Sample objects. See holdfast_protocol.stores.


class SampleOperations(Operations):
    def make_sample(self, request: MakeSample) -> SampleOffer:
        return self.transport.call("POST", path("store-samples"), SampleOffer, body=request)

    def check_sample(self, sample_id: str) -> SampleChecked:
        """Raises ChunkGone where it has not arrived."""
        return self.transport.call("POST", path("store-samples", sample_id, "checks"), SampleChecked)

    def delete_sample(self, sample_id: str) -> None:
        self.transport.send("DELETE", path("store-samples", sample_id))


# Copies in a second store: how far behind it is, and drills. See holdfast_protocol.copies.


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


# Scrub on demand, and what a bad chunk means. See holdfast_protocol.copies.


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


# What gets cold when, and thaws. See holdfast_protocol.tiers.


class TierOperations(Operations):
    def tiers_plan(self, project: str, run: str) -> TierPlan:
        """What the tiers policy would move when, net of sharing. Nothing moves by it."""
        return self.transport.call("GET", path("projects", project, "runs", run, "tiers", "plan"), TierPlan)

    def thaw(self, checkpoint_id: str, *, days: int = 3, speed: ThawSpeed = ThawSpeed.STANDARD) -> ThawView:
        """Asks for a cold checkpoint to be readable for `days` days from the thaw's end on. Repeating it prolongs."""
        request = RequestThaw(days=days, speed=speed)
        return self.transport.call("POST", path("checkpoints", checkpoint_id, "thaw"), ThawView, body=request)

    def thaw_status(self, checkpoint_id: str) -> ThawView:
        """How far a thaw is, or what one would take and cost."""
        return self.transport.call("GET", path("checkpoints", checkpoint_id, "thaw"), ThawView)


# What nothing needs any more, and objects that no row knows. See holdfast_protocol.stores.


class CollectionOperations(Operations):
    def plan_collection(self, project: str | None = None) -> CollectionPlan:
        """What the collector would delete now, store by store, and what waits for what. It changes nothing."""
        return self.transport.call("GET", path("collection"), CollectionPlan, params={"project": project})

    def collect_now(self) -> OperationView:
        """Starts a pass of the collector, with a look at every copy; its result is a CollectionPass."""
        return self.transport.call("POST", path("collection"), OperationView)

    def last_sweeps(self) -> SweepReport:
        return self.transport.call("GET", path("sweeps"), SweepReport)

    def sweep(self, request: StartSweep) -> OperationView:
        """Starts to compare a store, or all of them, with the catalog; its result is a SweepReport."""
        return self.transport.call("POST", path("sweeps"), OperationView, body=request)


# What checkpoints take up, and what that costs. See holdfast_protocol.usage.

# Every reference of a project is counted: with millions of them that takes longer than any other call.
_COUNTING_SECONDS = 300


class UsageOperations(Operations):
    def usage(self, project: str, run: str | None = None) -> UsageView:
        """Of a project, or of one of its runs."""
        return self.transport.call("GET", _route(project, run, "usage"), UsageView, waits_seconds=_COUNTING_SECONDS)

    def usage_of_projects(self, *, cursor: str | None = None, limit: int | None = None) -> Page[UsageView]:
        return self.transport.call(
            "GET",
            path("usage"),
            Page[UsageView],
            params={"cursor": cursor, "limit": limit},
            waits_seconds=_COUNTING_SECONDS,
        )

    def all_usage(self) -> Iterator[UsageView]:
        return all_items(lambda cursor: self.usage_of_projects(cursor=cursor))

    def cost(self, project: str, run: str | None = None) -> CostView:
        """What storing it costs a month, as it is now."""
        return self.transport.call("GET", _route(project, run, "cost"), CostView, waits_seconds=_COUNTING_SECONDS)

    def forecast_cost(self, project: str, run: str, request: ForecastCost) -> CostForecast:
        """What the run would cost a month under these policies, if it goes on as it has."""
        route = path("projects", project, "runs", run, "cost-forecast")
        return self.transport.call("POST", route, CostForecast, body=request, waits_seconds=_COUNTING_SECONDS)

    def prices(self) -> PriceListView:
        return self.transport.call("GET", path("prices"), PriceListView)

    def put_prices(self, prices: PriceList) -> PriceListView:
        """Replaces the whole list."""
        return self.transport.call("PUT", path("prices"), PriceListView, body=prices)


def _route(project: str, run: str | None, what: str) -> str:
    return path("projects", project, what) if run is None else path("projects", project, "runs", run, what)

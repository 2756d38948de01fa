"""The stores: copies, scrubs, tiers, garbage, usage, samples."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast_client.resources.base import Resource, all_items, if_match, once
from holdfast_client.transport import path
from holdfast_protocol.base import Page
from holdfast_protocol.copies import BadCopy, Impact, RunCopies, ScrubMode, StartDrill, StartScrub
from holdfast_protocol.service import (
    OperationView,
)
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
    StoreView,
    SweepReport,
)
from holdfast_protocol.tiers import RequestThaw, ThawSpeed, ThawView, TierPlan
from holdfast_protocol.usage import CostForecast, CostView, ForecastCost, PriceList, PriceListView, UsageView

_COUNTING_SECONDS = 300


def _route(project: str, run: str | None, what: str) -> str:
    return path("projects", project, what) if run is None else path("projects", project, "runs", run, what)


class Stores(Resource):
    """The attached stores."""

    def list(self) -> list[StoreView]:
        return self._whole(path("stores"), Page[StoreView])

    def claim(self, role: StoreRole, request: ClaimStore) -> StoreView:
        return self.transport.call("POST", path("stores", role.value, "claim"), StoreView, body=request)


class Catalog(Resource):
    """The catalog beside its stores."""

    def check(self, request: CheckCatalog) -> OperationView:
        """Started, or running already; its result is a CatalogCheck. See `operations.wait`."""
        return self.transport.call("POST", path("catalog", "checks"), OperationView, body=request, headers=once())

    def doubts(self) -> list[DoubtView]:
        """Facts that a rebuild of the catalog could not know, and that no person has confirmed since."""
        return self._whole(path("catalog", "doubts"), Page[DoubtView])

    def confirm(self, request: ConfirmCommits) -> DoubtView:
        return self.transport.call("POST", path("catalog", "confirmations"), DoubtView, body=request)


class Samples(Resource):
    """Sample objects of `holdfast doctor`."""

    def create(self, request: MakeSample) -> SampleOffer:
        return self.transport.call("POST", path("store-samples"), SampleOffer, body=request)

    def check(self, sample_id: str) -> SampleChecked:
        """Raises ChunkGone if it has not arrived."""
        return self.transport.call("POST", path("store-samples", sample_id, "check"), SampleChecked)

    def delete(self, sample_id: str) -> None:
        self.transport.send("DELETE", path("store-samples", sample_id))


class Copies(Resource):
    """Copies in a second store: how far behind it is, and drills."""

    def of_run(self, project: str, run: str) -> RunCopies:
        """How far the second store is behind with a run: in seconds, steps and bytes."""
        return self.transport.call("GET", path("projects", project, "runs", run, "copies"), RunCopies)

    def list(
        self, project: str, *, late: bool = False, cursor: str | None = None, limit: int | None = None
    ) -> Page[RunCopies]:
        """The same for one page of a project's runs, by name. `late`: only those that miss their objective (RPO)."""
        params = {"late": late or None, "cursor": cursor, "limit": limit}
        return self.transport.call("GET", path("projects", project, "copies"), Page[RunCopies], params=params)

    def all(self, project: str, *, late: bool = False) -> Iterator[RunCopies]:
        return all_items(lambda cursor: self.list(project, late=late, cursor=cursor))

    def drill(
        self, project: str, run: str, selector: str = "latest", store: StoreRole = StoreRole.SECOND
    ) -> OperationView:
        """Has a checkpoint restored from one store alone, every byte verified. `operations.wait` gives the result, a
        DrillResult."""
        route = path("projects", project, "runs", run, "drills")
        request = StartDrill(selector=selector, store=store)
        return self.transport.call("POST", route, OperationView, body=request, headers=once())


class Scrubs(Resource):
    """Reading copies again, and the consequences of damage."""

    def run(self, project: str, run: str, mode: ScrubMode = ScrubMode.READ) -> OperationView:
        """Has every copy of the run's chunks read again. `operations.wait` gives the result, a ScrubResult."""
        route = path("projects", project, "runs", run, "scrubs")
        return self.transport.call("POST", route, OperationView, body=StartScrub(mode=mode), headers=once())

    def checkpoint(self, checkpoint_id: str, mode: ScrubMode = ScrubMode.READ) -> OperationView:
        """The same for one checkpoint's chunks."""
        route = path("checkpoints", checkpoint_id, "scrubs")
        return self.transport.call("POST", route, OperationView, body=StartScrub(mode=mode), headers=once())

    def impact_of_chunk(self, digest: str) -> Impact:
        """The checkpoints and runs that need this chunk, in all projects that the token sees."""
        return self.transport.call("GET", path("chunks", digest, "impact"), Impact)

    def impact_of_checkpoint(self, checkpoint_id: str) -> Impact:
        """The bad chunks of this checkpoint, and the other checkpoints that need them."""
        return self.transport.call("GET", path("checkpoints", checkpoint_id, "impact"), Impact)

    def bad_copies(self, project: str, *, cursor: str | None = None, limit: int | None = None) -> Page[BadCopy]:
        """One page of the copies that are bad or suspect."""
        return self.transport.call(
            "GET", path("projects", project, "bad-copies"), Page[BadCopy], params={"cursor": cursor, "limit": limit}
        )

    def all_bad_copies(self, project: str) -> Iterator[BadCopy]:
        return all_items(lambda cursor: self.bad_copies(project, cursor=cursor))


class Tiers(Resource):
    """Cold checkpoints."""

    def plan(self, project: str, run: str) -> TierPlan:
        """What the tiers policy would move, and when, net of sharing. Moves nothing."""
        return self.transport.call("GET", path("projects", project, "runs", run, "tiers", "plan"), TierPlan)

    def thaw(self, checkpoint_id: str, *, days: int = 3, speed: ThawSpeed = ThawSpeed.STANDARD) -> ThawView:
        """Asks for a cold checkpoint to be readable for `days` days from the thaw's end on. Repeating it prolongs."""
        request = RequestThaw(days=days, speed=speed)
        return self.transport.call("POST", path("checkpoints", checkpoint_id, "thaw"), ThawView, body=request)

    def thaw_status(self, checkpoint_id: str) -> ThawView:
        """How far a thaw is, or how long one would take and cost."""
        return self.transport.call("GET", path("checkpoints", checkpoint_id, "thaw"), ThawView)


class Collections(Resource):
    """Deletion of unneeded copies and objects."""

    def plan(self, project: str | None = None) -> CollectionPlan:
        """The copies that the collector would delete now, store by store, and what the others wait for. Changes
        nothing."""
        return self.transport.call("GET", path("collections", "plan"), CollectionPlan, params={"project": project})

    def start(self) -> OperationView:
        """Starts a pass of the collector over every copy; its result is a CollectionPass."""
        return self.transport.call("POST", path("collections"), OperationView, headers=once())


class Sweeps(Resource):
    """Objects in the stores that no row of the catalog knows."""

    def last(self) -> SweepReport:
        """What the last sweep of each store found."""
        return self.transport.call("GET", path("sweeps"), SweepReport)

    def start(self, request: StartSweep) -> OperationView:
        """Starts to compare a store, or all of them, with the catalog; its result is a SweepReport."""
        return self.transport.call("POST", path("sweeps"), OperationView, body=request, headers=once())


class Usage(Resource):
    """Bytes and costs."""

    def get(self, project: str, run: str | None = None) -> UsageView:
        """The usage of a project, or of one of its runs."""
        return self.transport.call("GET", _route(project, run, "usage"), UsageView, waits_seconds=_COUNTING_SECONDS)

    def list(self, *, cursor: str | None = None, limit: int | None = None) -> Page[UsageView]:
        return self.transport.call(
            "GET",
            path("usage"),
            Page[UsageView],
            params={"cursor": cursor, "limit": limit},
            waits_seconds=_COUNTING_SECONDS,
        )

    def all(self) -> Iterator[UsageView]:
        return all_items(lambda cursor: self.list(cursor=cursor))

    def cost(self, project: str, run: str | None = None) -> CostView:
        """The present cost of its storage a month."""
        return self.transport.call("GET", _route(project, run, "cost"), CostView, waits_seconds=_COUNTING_SECONDS)

    def forecast(self, project: str, run: str, request: ForecastCost) -> CostForecast:
        """What the run would cost a month under these policies, if it goes on as before."""
        route = path("projects", project, "runs", run, "cost", "forecast")
        return self.transport.call("POST", route, CostForecast, body=request, waits_seconds=_COUNTING_SECONDS)

    def prices(self) -> PriceListView:
        return self.transport.call("GET", path("prices"), PriceListView)

    def put_prices(self, prices: PriceList, etag: str) -> PriceListView:
        """Replaces the whole list that `etag` was read from. Raises EditConflict."""
        return self.transport.call("PUT", path("prices"), PriceListView, body=prices, headers=if_match(etag))

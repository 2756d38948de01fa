"""What nothing needs any more, and objects that no row knows. See holdfast_protocol.collection."""

from __future__ import annotations

from holdfast_client.operations.base import Operations
from holdfast_client.transport import path
from holdfast_protocol.collection import CollectionPlan, StartSweep, SweepReport
from holdfast_protocol.operations import OperationView


class CollectionOperations(Operations):
    def plan_collection(self, project: str | None = None) -> CollectionPlan:
        """What the collector would delete now, store by store, and what waits for what. It changes nothing."""
        return self.transport.call("GET", path("collection"), CollectionPlan, params={"project": project})

    def collect_now(self) -> OperationView:
        """Starts a round of the collector, with a look at every copy; its result is a CollectionRound."""
        return self.transport.call("POST", path("collection"), OperationView)

    def last_sweeps(self) -> SweepReport:
        return self.transport.call("GET", path("sweeps"), SweepReport)

    def sweep(self, request: StartSweep) -> OperationView:
        """Starts to compare a store, or all of them, with the catalog; its result is a SweepReport."""
        return self.transport.call("POST", path("sweeps"), OperationView, body=request)

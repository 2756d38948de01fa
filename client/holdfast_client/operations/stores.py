"""The attached stores, their comparison with the catalog, and their adoption. See holdfast_protocol.stores."""

from __future__ import annotations

from holdfast_client.operations.base import Operations
from holdfast_client.transport import path
from holdfast_protocol.base import Page
from holdfast_protocol.operations import OperationView
from holdfast_protocol.states import StoreRole
from holdfast_protocol.stores import AdoptStore, CheckCatalog, ConfirmCommits, DoubtView, StoreClock, StoreView


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

    def adopt_store(self, role: StoreRole, request: AdoptStore) -> StoreView:
        return self.transport.call("POST", path("stores", role.value, "adopt"), StoreView, body=request)

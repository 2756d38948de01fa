"""Long operations of the service: look, cancel, wait. See holdfast_protocol.operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from holdfast_client.errors import ServiceUnavailable
from holdfast_client.operations.base import Operations
from holdfast_client.operations.pages import all_items
from holdfast_client.transport import path
from holdfast_protocol.base import Page
from holdfast_protocol.operations import OperationView
from holdfast_protocol.states import OperationState

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0


class LongOperations(Operations):
    def operations(
        self,
        *,
        project: str | None = None,
        run: str | None = None,
        kind: str | None = None,
        state: OperationState | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[OperationView]:
        """One page of long operations, newest first."""
        params = {"project": project, "run": run, "kind": kind, "state": state, "cursor": cursor, "limit": limit}
        return self.transport.call("GET", path("operations"), Page[OperationView], params=params)

    def all_operations(
        self,
        *,
        project: str | None = None,
        run: str | None = None,
        kind: str | None = None,
        state: OperationState | None = None,
    ) -> Iterator[OperationView]:
        return all_items(
            lambda cursor: self.operations(project=project, run=run, kind=kind, state=state, cursor=cursor)
        )

    def operation(self, operation_id: str) -> OperationView:
        return self.transport.call("GET", path("operations", operation_id), OperationView)

    def cancel_operation(self, operation_id: str) -> OperationView:
        """Its worker stops at the next step; what it has done stays done."""
        return self.transport.call("POST", path("operations", operation_id, "cancel"), OperationView)

    def wait_operation(
        self,
        operation_id: str,
        *,
        timeout_seconds: float | None = None,
        on_view: Callable[[OperationView], None] | None = None,
    ) -> OperationView:
        """Until it has ended, however: look at its `state`. `on_view` is told of each look in between. Raises
        ServiceUnavailable when the time is over."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            view = self.operation(operation_id)
            if on_view is not None:
                on_view(view)
            if view.state.ended:
                return view
            if deadline is not None and time.monotonic() >= deadline:
                raise ServiceUnavailable(
                    f"The operation {operation_id} has not ended within {timeout_seconds:.0f} seconds. It goes on; "
                    f"wait for it with `holdfast operations wait {operation_id}`."
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

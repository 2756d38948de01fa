"""The service's controllers and processes. See holdfast_protocol.controllers."""

from __future__ import annotations

import time

from holdfast_client.errors import ControllerPaused, ServiceUnavailable
from holdfast_client.operations.base import Operations
from holdfast_client.transport import path
from holdfast_protocol.base import Page
from holdfast_protocol.controllers import ControllerView, PauseController, WorkerView

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0


class ControllerOperations(Operations):
    def controllers(self) -> list[ControllerView]:
        return self.transport.call("GET", path("controllers"), Page[ControllerView]).items

    def controller(self, name: str) -> ControllerView:
        return self.transport.call("GET", path("controllers", name), ControllerView)

    def pause_controller(self, name: str, reason: str) -> ControllerView:
        """Rounds under way end, and none begins until `resume_controller`, in any process."""
        body = PauseController(reason=reason)
        return self.transport.call("POST", path("controllers", name, "pause"), ControllerView, body=body)

    def resume_controller(self, name: str) -> ControllerView:
        return self.transport.call("POST", path("controllers", name, "resume"), ControllerView)

    def run_controller(self, name: str) -> ControllerView:
        """Asks for a round now, in one process; `wait_controller` waits for its end. Raises ControllerPaused."""
        return self.transport.call("POST", path("controllers", name, "run"), ControllerView)

    def wait_controller(self, asked: ControllerView, *, timeout_seconds: float | None = None) -> ControllerView:
        """`asked` is the answer of `run_controller`. Raises ControllerPaused if somebody pauses it meanwhile, and
        ServiceUnavailable when the time is over."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        wanted = asked.run_requested_at
        while True:
            view = self.controller(asked.name)
            if wanted is None or (view.run_answered_at is not None and view.run_answered_at >= wanted):
                return view
            if view.paused_at is not None:
                raise ControllerPaused(
                    f"{view.name} was paused by {view.paused_by}: {view.pause_reason}. The round comes when it is "
                    "resumed."
                )
            if deadline is not None and time.monotonic() >= deadline:
                raise ServiceUnavailable(
                    f"No process has done the round of {view.name} within {timeout_seconds:.0f} seconds. See whether "
                    "one runs, with `holdfast workers`."
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def workers(self) -> list[WorkerView]:
        """The processes that serve or work now, and those that fell silent within the last day."""
        return self.transport.call("GET", path("workers"), Page[WorkerView]).items

"""What gets cold when, and thaws. See holdfast_protocol.tiers."""

from __future__ import annotations

from holdfast_client.operations.base import Operations
from holdfast_client.transport import path
from holdfast_protocol.tiers import RequestThaw, ThawSpeed, ThawView, TierPlan


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

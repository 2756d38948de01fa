"""The controllers of liveness: `reap` gives up abandoned uploads, `liveness` notes attempts that stand still."""

from __future__ import annotations

from holdfast_service.liveness import abandoned_uploads, stalled_attempts
from holdfast_service.settings import ServiceSettings
from holdfast_service.work.report import ControllerLoop


def loops(settings: ServiceSettings) -> tuple[ControllerLoop, ...]:
    """The controllers of this room."""
    interval = settings.controller_interval_seconds
    return (
        ControllerLoop("reap", interval, abandoned_uploads.reconcile, abandoned_uploads.backlog, longest_pauses=3),
        ControllerLoop("liveness", interval, stalled_attempts.reconcile, stalled_attempts.backlog),
    )

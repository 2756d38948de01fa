"""One checkpoint, now. With `?wait=` the endpoint waits for the notifier in between."""

from __future__ import annotations

from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.states import Scope
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.resolve import checkpoint_by_id
from holdfast_service.catalog.views import current_checkpoint_view
from holdfast_service.context import ServiceContext


def read_checkpoint(context: ServiceContext, caller: Principal, checkpoint_id: str) -> CheckpointView:
    """For tokens that read and for those that train: a job waits for its own commit. Raises `checkpoint_not_found`."""
    if Scope.TRAIN not in caller.scopes:
        caller.check_scope(Scope.READ)
    with context.database.read() as session:
        project, run, checkpoint = checkpoint_by_id(session, caller, checkpoint_id)
        return current_checkpoint_view(session, project.name, run.name, checkpoint)

"""Starts a scrub on demand, of a run or of one checkpoint: an operation, which any worker carries out."""

from __future__ import annotations

from holdfast_protocol.operations import OperationView
from holdfast_protocol.scrub import StartScrub
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.operations import start_operation
from holdfast_service.catalog.readable import refuse_unless_whole
from holdfast_service.catalog.resolve import checkpoint_by_id, run_named
from holdfast_service.context import ServiceContext

KIND = "scrub"


def scrub_run(context: ServiceContext, caller: Principal, project: str, run: str, request: StartScrub) -> OperationView:
    """Every checkpoint of the run that is there. Raises `forbidden`, `project_not_found` and `run_not_found`."""
    with context.database.transaction() as session:
        owner, found = run_named(session, caller, project, run)
        return start_operation(
            session, caller, KIND, project_id=owner.id, run_id=found.id, arguments=request.model_dump(mode="json")
        )


def scrub_checkpoint(
    context: ServiceContext, caller: Principal, checkpoint_id: str, request: StartScrub
) -> OperationView:
    """Raises `checkpoint_not_found` and what refuse_unless_whole raises."""
    with context.database.transaction() as session:
        project, run, checkpoint = checkpoint_by_id(session, caller, checkpoint_id)
        refuse_unless_whole(checkpoint)
        return start_operation(
            session,
            caller,
            KIND,
            project_id=project.id,
            run_id=run.id,
            checkpoint_id=checkpoint.id,
            arguments=request.model_dump(mode="json"),
        )

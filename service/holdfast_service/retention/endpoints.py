"""Routes of retention, of deleting and taking back, and of pins."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Response

from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.pruning import (
    ApplyRetention,
    DeleteAll,
    Deletion,
    PinCheckpoint,
    PlanRetention,
    PruneCheckpoints,
    Pruned,
    RetentionPlan,
    TakenBack,
    UndeleteCheckpoint,
)
from holdfast_protocol.runs import RunName
from holdfast_protocol.states import Scope
from holdfast_service.auth.authenticate import require
from holdfast_service.auth.principal import Principal
from holdfast_service.context import Context
from holdfast_service.retention import prune as applying
from holdfast_service.retention import prune as pruning
from holdfast_service.retention.delete import delete_project, delete_run, undelete_project, undelete_run
from holdfast_service.retention.pins import pin_checkpoint, unpin_checkpoint
from holdfast_service.retention.show_plan import show_plan
from holdfast_service.retention.trash import undelete_checkpoint
from holdfast_service.web.guarded_route import GuardedRoute

router = APIRouter(route_class=GuardedRoute, prefix="/v1", tags=["retention"])

Reader = Annotated[Principal, require(Scope.READ)]
Operator = Annotated[Principal, require(Scope.OPERATE)]
Admin = Annotated[Principal, require(Scope.ADMIN)]
IfMatch = Annotated[str | None, Header(description="The `etag` of the dry run that was seen, or *.")]


@router.post(
    "/projects/{project}/runs/{run}/retention/plan",
    summary="Keep or expire, for each checkpoint, with every reason; it changes nothing",
)
def plan(project: str, run: str, body: PlanRetention, context: Context, caller: Reader) -> RetentionPlan:
    return show_plan(context, caller, project, run, body)


@router.post(
    "/projects/{project}/runs/{run}/retention/apply", summary="Expire what a plan has shown and the run still allows"
)
def apply(project: str, run: str, body: ApplyRetention, context: Context, caller: Operator) -> Pruned:
    return applying.apply_plan(context, caller, project, run, body)


@router.post("/projects/{project}/runs/{run}/prune", summary="Move checkpoints to the trash, by id or by a filter")
def prune(project: str, run: str, body: PruneCheckpoints, context: Context, caller: Operator) -> Pruned:
    return pruning.prune(context, caller, project, run, body)


@router.post("/checkpoints/{checkpoint_id}/undelete", summary="Take a checkpoint back from the trash")
def undelete(
    checkpoint_id: str, body: UndeleteCheckpoint, context: Context, caller: Operator, response: Response
) -> CheckpointView:
    return _tagged(response, undelete_checkpoint(context, caller, checkpoint_id, body))


@router.delete("/projects/{project}/runs/{run}", summary="Move a whole run to the trash, as it was seen")
def delete_all_of_run(
    *, project: str, run: str, body: DeleteAll, context: Context, caller: Operator, if_match: IfMatch = None
) -> Deletion:
    return delete_run(context, caller, RunName(project, run), body, if_match)


@router.post("/projects/{project}/runs/{run}/undelete", summary="Take a run back from the trash")
def undelete_all_of_run(project: str, run: str, context: Context, caller: Operator) -> TakenBack:
    return undelete_run(context, caller, project, run)


@router.delete("/projects/{project}", summary="Delete a project whose runs are all deleted")
def delete_whole_project(
    project: str, body: DeleteAll, context: Context, caller: Admin, if_match: IfMatch = None
) -> Deletion:
    return delete_project(context, caller, project, body, if_match)


@router.post("/projects/{project}/undelete", summary="Take a project back; its runs are taken back one by one")
def undelete_whole_project(project: str, context: Context, caller: Admin) -> TakenBack:
    return undelete_project(context, caller, project)


@router.put("/checkpoints/{checkpoint_id}/pin", summary="Pin a checkpoint: it stays until it is unpinned, or the end")
def pin(
    checkpoint_id: str, body: PinCheckpoint, context: Context, caller: Operator, response: Response
) -> CheckpointView:
    return _tagged(response, pin_checkpoint(context, caller, checkpoint_id, body))


@router.delete("/checkpoints/{checkpoint_id}/pin", summary="Take a checkpoint's pin away")
def unpin(checkpoint_id: str, context: Context, caller: Operator, response: Response) -> CheckpointView:
    return _tagged(response, unpin_checkpoint(context, caller, checkpoint_id))


def _tagged(response: Response, view: CheckpointView) -> CheckpointView:
    response.headers["ETag"] = view.etag
    return view

"""Routes of retention, of deleting and taking back, and of pins."""

from __future__ import annotations

from fastapi import APIRouter, Response

from holdfast_protocol.base import RunName
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
from holdfast_service.context import Context
from holdfast_service.retention import prune as applying
from holdfast_service.retention import prune as pruning
from holdfast_service.retention.delete import delete_project, delete_run, undelete_project, undelete_run
from holdfast_service.retention.pins import pin_checkpoint, unpin_checkpoint
from holdfast_service.retention.show_plan import show_plan
from holdfast_service.retention.trash import undelete_checkpoint
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import IfMatch, Operator, PlatformAdmin, Reader, tagged

retention_router = APIRouter(
    route_class=GuardedRoute, prefix="/v1/projects/{project}/runs/{run}/retention", tags=["retention"]
)
checkpoints_router = APIRouter(route_class=GuardedRoute, prefix="/v1/checkpoints/{checkpoint_id}", tags=["checkpoints"])
runs_router = APIRouter(route_class=GuardedRoute, prefix="/v1/projects/{project}/runs/{run}", tags=["runs"])
projects_router = APIRouter(route_class=GuardedRoute, prefix="/v1/projects/{project}", tags=["projects"])


@retention_router.post(
    "/plan",
    summary="Keep or expire, for each checkpoint, with every reason; it changes nothing",
)
def plan(project: str, run: str, body: PlanRetention, context: Context, caller: Reader) -> RetentionPlan:
    return show_plan(context, caller, project, run, body)


@retention_router.post("/apply", summary="Expire what a plan has shown and the run still allows")
def apply(project: str, run: str, body: ApplyRetention, context: Context, caller: Operator) -> Pruned:
    return applying.apply_plan(context, caller, project, run, body)


@retention_router.post("/prune", summary="Move checkpoints to the trash, by id or by a filter")
def prune(project: str, run: str, body: PruneCheckpoints, context: Context, caller: Operator) -> Pruned:
    return pruning.prune(context, caller, project, run, body)


@checkpoints_router.post("/undelete", summary="Take a checkpoint back from the trash")
def undelete(
    checkpoint_id: str, body: UndeleteCheckpoint, context: Context, caller: Operator, response: Response
) -> CheckpointView:
    return tagged(response, undelete_checkpoint(context, caller, checkpoint_id, body))


@runs_router.delete("", name="delete", summary="Move a whole run to the trash, as it was seen")
def delete_all_of_run(
    *, project: str, run: str, body: DeleteAll, context: Context, caller: Operator, if_match: IfMatch = None
) -> Deletion:
    return delete_run(context, caller, RunName(project, run), body, if_match)


@runs_router.post("/undelete", name="undelete", summary="Take a run back from the trash")
def undelete_all_of_run(project: str, run: str, context: Context, caller: Operator) -> TakenBack:
    return undelete_run(context, caller, project, run)


@projects_router.delete("", name="delete", summary="Delete a project whose runs are all deleted")
def delete_whole_project(
    project: str, body: DeleteAll, context: Context, caller: PlatformAdmin, if_match: IfMatch = None
) -> Deletion:
    return delete_project(context, caller, project, body, if_match)


@projects_router.post("/undelete", name="undelete", summary="Take a project back; its runs are taken back one by one")
def undelete_whole_project(project: str, context: Context, caller: PlatformAdmin) -> TakenBack:
    return undelete_project(context, caller, project)


@checkpoints_router.put("/pin", summary="Pin a checkpoint: it stays until it is unpinned, or the end")
def pin(
    checkpoint_id: str,
    body: PinCheckpoint,
    *,
    context: Context,
    caller: Operator,
    response: Response,
    if_match: IfMatch = None,
) -> CheckpointView:
    return tagged(response, pin_checkpoint(context, caller, checkpoint_id, body, if_match))


@checkpoints_router.delete("/pin", summary="Take a checkpoint's pin away")
def unpin(
    checkpoint_id: str, *, context: Context, caller: Operator, response: Response, if_match: IfMatch = None
) -> CheckpointView:
    return tagged(response, unpin_checkpoint(context, caller, checkpoint_id, if_match))

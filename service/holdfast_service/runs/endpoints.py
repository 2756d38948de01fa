"""Routes for looking: projects, runs, checkpoints and the service itself; and the small edits of people."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response

from holdfast_protocol.attempts import CheckpointDiff
from holdfast_protocol.base import Label, Name, Page, RunName
from holdfast_protocol.checkpoints import CheckpointView, EditCheckpoint, Step
from holdfast_protocol.runs import EditProject, EditRun, ForkRun, ProjectView, RunView
from holdfast_protocol.service import ServerInfo
from holdfast_protocol.states import CheckpointState, Health, RunStatus
from holdfast_service.context import Context
from holdfast_service.db.pages import DEFAULT_PAGE
from holdfast_service.runs import list_runs as runs
from holdfast_service.runs import projects
from holdfast_service.runs.compare_checkpoints import compare_checkpoints
from holdfast_service.runs.fork import fork_run
from holdfast_service.runs.list_checkpoints import (
    CheckpointFilter,
    edit_checkpoint,
    list_across_runs,
    list_checkpoints,
    select_checkpoint,
)
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.health import server_info
from holdfast_service.web.parameters import (
    Admin,
    AnyCaller,
    Cursor,
    IdempotencyKey,
    IfMatch,
    Limit,
    Moment,
    Operator,
    Reader,
    Trainer,
    made,
    or_made,
    tagged,
)

service_router = APIRouter(route_class=GuardedRoute, tags=["service"])
projects_router = APIRouter(route_class=GuardedRoute, prefix="/v1/projects", tags=["projects"])
all_runs_router = APIRouter(route_class=GuardedRoute, prefix="/v1/runs", tags=["runs"])
runs_router = APIRouter(route_class=GuardedRoute, prefix="/v1/projects/{project}/runs", tags=["runs"])
checkpoints_router = APIRouter(route_class=GuardedRoute, prefix="/v1", tags=["checkpoints"])

Statuses = Annotated[list[RunStatus] | None, Query(description="One or several.")]
Deleted = Annotated[bool, Query(description="Those in the trash, and no others.")]


@service_router.get("/v1/service", name="show", summary="The service, its protocol, and what the token may do")
def server(context: Context, caller: AnyCaller) -> ServerInfo:
    return server_info(context, caller)


@projects_router.get("", name="list", summary="List projects by name")
def list_projects(
    *, context: Context, caller: Reader, deleted: Deleted = False, cursor: Cursor = None, limit: Limit = DEFAULT_PAGE
) -> Page[ProjectView]:
    return projects.list_projects(context, caller, deleted=deleted, cursor=cursor, limit=limit)


@projects_router.get("/{project}", name="show", summary="Show a project and what it holds")
def show_project(project: str, context: Context, caller: Reader, response: Response) -> ProjectView:
    return tagged(response, projects.show_project(context, caller, project))


@projects_router.put(
    "/{project}",
    name="put",
    responses=or_made(ProjectView),
    summary="Make a project, or change its quota from the one that was seen",
)
def put_project(
    *,
    project: Name,
    body: EditProject,
    context: Context,
    caller: Admin,
    response: Response,
    if_match: IfMatch = None,
) -> ProjectView:
    view, is_new = projects.put_project(context, caller, project, body, if_match)
    made(response, is_new=is_new)
    return tagged(response, view)


@all_runs_router.get("", name="list_all", summary="List the runs of all projects that the token sees, the newest first")
def list_all_runs(
    *,
    context: Context,
    caller: Reader,
    status: Statuses = None,
    tag: Annotated[Label | None, Query()] = None,
    deleted: Deleted = False,
    cursor: Cursor = None,
    limit: Limit = DEFAULT_PAGE,
) -> Page[RunView]:
    return runs.list_runs(
        context, caller, None, statuses=status or (), tag=tag, deleted=deleted, cursor=cursor, limit=limit
    )


@runs_router.get("", name="list", summary="List runs, the newest first, with their restore points")
def list_runs(
    *,
    project: str,
    context: Context,
    caller: Reader,
    status: Statuses = None,
    tag: Annotated[Label | None, Query()] = None,
    forked_from: Annotated[
        str | None, Query(max_length=200, description="Only forks of this run, or of this checkpoint (ck_…).")
    ] = None,
    deleted: Deleted = False,
    cursor: Cursor = None,
    limit: Limit = DEFAULT_PAGE,
) -> Page[RunView]:
    return runs.list_runs(
        context,
        caller,
        project,
        statuses=status or (),
        tag=tag,
        forked_from=forked_from,
        deleted=deleted,
        cursor=cursor,
        limit=limit,
    )


@runs_router.get("/{run}", name="show", summary="Show a run and its restore point")
def show_run(project: str, run: str, context: Context, caller: Reader, response: Response) -> RunView:
    return tagged(response, runs.show_run(context, caller, project, run))


@runs_router.put("/{run}", name="put", responses=or_made(RunView), summary="Make a run; the same again is fine")
def put_run(project: str, run: Name, context: Context, caller: Trainer, response: Response) -> RunView:
    view, is_new = runs.put_run(context, caller, project, run)
    made(response, is_new=is_new)
    return tagged(response, view)


@runs_router.patch("/{run}", name="edit", summary="Change tags or note of the version that was seen")
def edit_run(
    *,
    project: str,
    run: str,
    body: EditRun,
    context: Context,
    caller: Operator,
    response: Response,
    if_match: IfMatch = None,
) -> RunView:
    return tagged(response, runs.edit_run(context, caller, RunName(project, run), body, if_match))


@runs_router.post(
    "/{run}/forks",
    status_code=201,
    name="fork",
    responses={200: {"model": RunView, "description": "The same fork was made before."}},
    summary="Make a run that begins with a checkpoint of this one, without a copy of a byte",
)
def fork(
    *,
    project: str,
    run: str,
    body: ForkRun,
    context: Context,
    caller: Trainer,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> RunView:
    view, is_new = fork_run(context, caller, RunName(project, run), body, key=idempotency_key)
    made(response, is_new=is_new)
    return tagged(response, view)


def _filter(
    *,
    state: Annotated[list[CheckpointState] | None, Query(description="One or several.")] = None,
    health: Annotated[list[Health] | None, Query(description="One or several.")] = None,
    min_step: Annotated[Step | None, Query()] = None,
    max_step: Annotated[Step | None, Query()] = None,
    committed_since: Annotated[Moment | None, Query(description="From this moment on.")] = None,
    committed_before: Annotated[Moment | None, Query(description="Before this moment.")] = None,
    label: Annotated[Label | None, Query()] = None,
    attempt: Annotated[int | None, Query(ge=1)] = None,
) -> CheckpointFilter:
    return CheckpointFilter(
        states=state or (),
        healths=health or (),
        min_step=min_step,
        max_step=max_step,
        committed_since=committed_since,
        committed_before=committed_before,
        label=label,
        attempt=attempt,
    )


Wanted = Annotated[CheckpointFilter, Depends(_filter)]
_RUN_BY_RUN = "run by run, the largest step first"


@checkpoints_router.get(
    "/checkpoints", name="list_all", summary=f"List checkpoints of all projects that the token sees, {_RUN_BY_RUN}"
)
def all_checkpoints(
    *, context: Context, caller: Reader, wanted: Wanted, cursor: Cursor = None, limit: Limit = DEFAULT_PAGE
) -> Page[CheckpointView]:
    return list_across_runs(context, caller, None, wanted, cursor=cursor, limit=limit)


@checkpoints_router.get(
    "/projects/{project}/checkpoints",
    name="list_of_project",
    summary=f"List checkpoints of all runs of a project, {_RUN_BY_RUN}",
)
def project_checkpoints(
    *,
    project: str,
    context: Context,
    caller: Reader,
    wanted: Wanted,
    cursor: Cursor = None,
    limit: Limit = DEFAULT_PAGE,
) -> Page[CheckpointView]:
    return list_across_runs(context, caller, project, wanted, cursor=cursor, limit=limit)


@checkpoints_router.get(
    "/projects/{project}/runs/{run}/checkpoints", name="list", summary="List checkpoints, the largest step first"
)
def checkpoints(
    *,
    project: str,
    run: str,
    context: Context,
    caller: Reader,
    wanted: Wanted,
    cursor: Cursor = None,
    limit: Limit = DEFAULT_PAGE,
) -> Page[CheckpointView]:
    return list_checkpoints(context, caller, project, run, wanted, cursor=cursor, limit=limit)


@checkpoints_router.get(
    "/projects/{project}/runs/{run}/checkpoints/{selector}",
    name="select",
    summary="Show the checkpoint that a selector means: latest, 1200, 1200#3, best:loss:min, ck_…",
)
def selected(
    *,
    project: str,
    run: str,
    selector: Annotated[str, Path(description="`#` must be written as `%23`.", examples=["latest"])],
    context: Context,
    caller: Reader,
    response: Response,
) -> CheckpointView:
    return tagged(response, select_checkpoint(context, caller, project, run, selector))


@checkpoints_router.get(
    "/checkpoints/{checkpoint_id}/diff",
    summary="Compare a checkpoint with another one, of any run that the caller sees",
)
def diff(
    *,
    checkpoint_id: str,
    against: Annotated[str, Query(max_length=200, description="The id of the one before.")],
    context: Context,
    caller: Reader,
) -> CheckpointDiff:
    return compare_checkpoints(context, caller, checkpoint_id, against=against)


@checkpoints_router.patch(
    "/checkpoints/{checkpoint_id}", summary="Change labels, health or metrics of the version that was seen"
)
def edit(
    *,
    checkpoint_id: str,
    body: EditCheckpoint,
    context: Context,
    caller: Operator,
    response: Response,
    if_match: IfMatch = None,
) -> CheckpointView:
    return tagged(response, edit_checkpoint(context, caller, checkpoint_id, body, if_match))

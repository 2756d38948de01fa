"""Routes for looking: projects, runs, checkpoints, manifests and the service itself; and the small edits of people."""

from __future__ import annotations

from typing import Annotated, TypeVar

from fastapi import APIRouter, Header, Path, Query, Response

from holdfast_protocol.base import Label, Name, Page
from holdfast_protocol.checkpoints import CheckpointView, EditCheckpoint, Manifest, ShardChunks, Step
from holdfast_protocol.runs import EditProject, ProjectView, RunView
from holdfast_protocol.service import ServerInfo
from holdfast_protocol.states import CheckpointState, Health, RunStatus, Scope
from holdfast_service.auth.authenticate import require
from holdfast_service.auth.principal import Principal
from holdfast_service.context import Context
from holdfast_service.db.pages import DEFAULT_PAGE, MAX_PAGE
from holdfast_service.runs import list_runs as runs
from holdfast_service.runs import projects
from holdfast_service.runs import views as manifest
from holdfast_service.runs.list_checkpoints import (
    CheckpointFilter,
    edit_checkpoint,
    list_checkpoints,
    select_checkpoint,
)
from holdfast_service.runs.projects import put_project
from holdfast_service.web.guarded_route import GuardedRoute
from holdfast_service.web.health import server_info

ViewT = TypeVar("ViewT", CheckpointView, ProjectView)

router = APIRouter(route_class=GuardedRoute, tags=["browse"])

Reader = Annotated[Principal, require(Scope.READ)]
Cursor = Annotated[str | None, Query(max_length=1000, description="`next_cursor` of the page before.")]
IfMatch = Annotated[str | None, Header(description="The `etag` that was seen.")]
Deleted = Annotated[bool, Query(description="Those in the trash, and no others.")]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Items of a page, at most.")]


@router.get("/v1/server", summary="The service, its protocol, and what the token may do")
def server(context: Context, caller: Annotated[Principal, require(None)]) -> ServerInfo:
    return server_info(context, caller)


@router.get("/v1/projects", summary="List projects by name")
def list_projects(
    *, context: Context, caller: Reader, deleted: Deleted = False, cursor: Cursor = None, limit: Limit = DEFAULT_PAGE
) -> Page[ProjectView]:
    return projects.list_projects(context, caller, deleted=deleted, cursor=cursor, limit=limit)


@router.get("/v1/projects/{project}", summary="Show a project and what it holds")
def show_project(project: str, context: Context, caller: Reader, response: Response) -> ProjectView:
    return _tagged(response, projects.show_project(context, caller, project))


@router.put("/v1/projects/{project}", summary="Make a project, or change its quota from the one that was seen")
def edit_project(
    *,
    project: Name,
    body: EditProject,
    context: Context,
    caller: Annotated[Principal, require(Scope.ADMIN)],
    response: Response,
    if_match: IfMatch = None,
) -> ProjectView:
    return _tagged(response, put_project(context, caller, project, body, if_match))


@router.get("/v1/projects/{project}/runs", summary="List runs, the newest first, with their restore points")
def list_runs(
    *,
    project: str,
    context: Context,
    caller: Reader,
    status: Annotated[list[RunStatus] | None, Query(description="One or several.")] = None,
    deleted: Deleted = False,
    cursor: Cursor = None,
    limit: Limit = DEFAULT_PAGE,
) -> Page[RunView]:
    return runs.list_runs(context, caller, project, statuses=status or (), deleted=deleted, cursor=cursor, limit=limit)


@router.get("/v1/projects/{project}/runs/{run}", summary="Show a run and its restore point")
def show_run(project: str, run: str, context: Context, caller: Reader) -> RunView:
    return runs.show_run(context, caller, project, run)


@router.put("/v1/projects/{project}/runs/{run}", summary="Make a run; the same again is fine")
def make_run(project: str, run: Name, context: Context, caller: Annotated[Principal, require(Scope.TRAIN)]) -> RunView:
    return runs.put_run(context, caller, project, run)


@router.get("/v1/projects/{project}/runs/{run}/checkpoints", summary="List checkpoints, the largest step first")
def checkpoints(
    *,
    project: str,
    run: str,
    context: Context,
    caller: Reader,
    state: Annotated[list[CheckpointState] | None, Query(description="One or several.")] = None,
    health: Annotated[list[Health] | None, Query(description="One or several.")] = None,
    min_step: Annotated[Step | None, Query()] = None,
    max_step: Annotated[Step | None, Query()] = None,
    label: Annotated[Label | None, Query()] = None,
    attempt: Annotated[int | None, Query(ge=1)] = None,
    cursor: Cursor = None,
    limit: Limit = DEFAULT_PAGE,
) -> Page[CheckpointView]:
    wanted = CheckpointFilter(
        states=state or (), healths=health or (), min_step=min_step, max_step=max_step, label=label, attempt=attempt
    )
    return list_checkpoints(context, caller, project, run, wanted, cursor=cursor, limit=limit)


@router.get(
    "/v1/projects/{project}/runs/{run}/checkpoints/{selector}",
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
    return _tagged(response, select_checkpoint(context, caller, project, run, selector))


@router.get("/v1/checkpoints/{checkpoint_id}/manifest", summary="What a checkpoint consists of, shard by shard")
def read_manifest(checkpoint_id: str, context: Context, caller: Reader) -> Manifest:
    return manifest.read_manifest(context, caller, checkpoint_id)


@router.get("/v1/checkpoints/{checkpoint_id}/shards/{rank}", summary="The chunks of one shard, in their order")
def read_shard(checkpoint_id: str, rank: int, context: Context, caller: Reader) -> ShardChunks:
    return manifest.read_shard_chunks(context, caller, checkpoint_id, rank)


@router.patch("/v1/checkpoints/{checkpoint_id}", summary="Change labels or health of the version that was seen")
def edit(
    *,
    checkpoint_id: str,
    body: EditCheckpoint,
    context: Context,
    caller: Annotated[Principal, require(Scope.OPERATE)],
    response: Response,
    if_match: IfMatch = None,
) -> CheckpointView:
    return _tagged(response, edit_checkpoint(context, caller, checkpoint_id, body, if_match))


def _tagged(response: Response, view: ViewT) -> ViewT:
    response.headers["ETag"] = view.etag
    return view

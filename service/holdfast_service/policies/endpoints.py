"""Routes of policies, of a project and of one run of it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Response

from holdfast_protocol.policies import PolicyKind, PolicyView, PutPolicy
from holdfast_protocol.states import Scope
from holdfast_service.auth.authenticate import require
from holdfast_service.auth.principal import Principal
from holdfast_service.context import Context
from holdfast_service.policies.policies import PolicyName, put_policy, remove_policy, show_policy
from holdfast_service.web.guarded_route import GuardedRoute

router = APIRouter(route_class=GuardedRoute, prefix="/v1/projects/{project}", tags=["policies"])

Reader = Annotated[Principal, require(Scope.READ)]
Operator = Annotated[Principal, require(Scope.OPERATE)]
IfMatch = Annotated[str | None, Header(description="The `etag` that was seen; left out for a first policy.")]


@router.get("/policies/{kind}", summary="Show a project's policy")
def show_of_project(project: str, kind: PolicyKind, context: Context, caller: Reader, response: Response) -> PolicyView:
    return _tagged(response, show_policy(context, caller, PolicyName(kind, project)))


@router.put("/policies/{kind}", summary="Put a project's policy, for every run that has none of its own")
def put_of_project(
    *,
    project: str,
    kind: PolicyKind,
    body: PutPolicy,
    context: Context,
    caller: Operator,
    response: Response,
    if_match: IfMatch = None,
) -> PolicyView:
    return _tagged(response, put_policy(context, caller, PolicyName(kind, project), body, if_match))


@router.delete("/policies/{kind}", summary="Delete a project's policy")
def delete_of_project(
    project: str, kind: PolicyKind, context: Context, caller: Operator, if_match: IfMatch = None
) -> PolicyView:
    return remove_policy(context, caller, PolicyName(kind, project), if_match)


@router.get("/runs/{run}/policies/{kind}", summary="Show the policy that holds for a run, and where it comes from")
def show_of_run(
    *, project: str, run: str, kind: PolicyKind, context: Context, caller: Reader, response: Response
) -> PolicyView:
    return _tagged(response, show_policy(context, caller, PolicyName(kind, project, run)))


@router.put("/runs/{run}/policies/{kind}", summary="Put a run's own policy")
def put_of_run(
    *,
    project: str,
    run: str,
    kind: PolicyKind,
    body: PutPolicy,
    context: Context,
    caller: Operator,
    response: Response,
    if_match: IfMatch = None,
) -> PolicyView:
    return _tagged(response, put_policy(context, caller, PolicyName(kind, project, run), body, if_match))


@router.delete("/runs/{run}/policies/{kind}", summary="Delete a run's own policy; its project's holds from then on")
def delete_of_run(
    *, project: str, run: str, kind: PolicyKind, context: Context, caller: Operator, if_match: IfMatch = None
) -> PolicyView:
    return remove_policy(context, caller, PolicyName(kind, project, run), if_match)


def _tagged(response: Response, view: PolicyView) -> PolicyView:
    response.headers["ETag"] = view.etag
    return view

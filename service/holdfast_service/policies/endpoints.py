"""Routes of policies, of a project and of one run of it."""

from __future__ import annotations

from fastapi import APIRouter, Response

from holdfast_protocol.policies.policy import PolicyKind, PolicyView, PutPolicy
from holdfast_service.context import Context
from holdfast_service.policies.policies import PolicyName, put_policy, remove_policy, show_policy
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import IfMatch, Operator, Reader, made, or_made, tagged

router = APIRouter(route_class=GuardedRoute, prefix="/v1/projects/{project}", tags=["policies"])


@router.get("/policies/{kind}", summary="Show a project's policy")
def show_of_project(project: str, kind: PolicyKind, context: Context, caller: Reader, response: Response) -> PolicyView:
    return tagged(response, show_policy(context, caller, PolicyName(kind, project)))


@router.put(
    "/policies/{kind}",
    responses=or_made(PolicyView),
    summary="Put a project's policy, for every run that has none of its own",
)
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
    view, is_new = put_policy(context, caller, PolicyName(kind, project), body, if_match)
    made(response, is_new=is_new)
    return tagged(response, view)


@router.delete("/policies/{kind}", summary="Delete a project's policy")
def delete_of_project(
    project: str, kind: PolicyKind, context: Context, caller: Operator, if_match: IfMatch = None
) -> PolicyView:
    return remove_policy(context, caller, PolicyName(kind, project), if_match)


@router.get("/runs/{run}/policies/{kind}", summary="Show the policy that holds for a run, and where it comes from")
def show_of_run(
    *, project: str, run: str, kind: PolicyKind, context: Context, caller: Reader, response: Response
) -> PolicyView:
    return tagged(response, show_policy(context, caller, PolicyName(kind, project, run)))


@router.put("/runs/{run}/policies/{kind}", responses=or_made(PolicyView), summary="Put a run's own policy")
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
    view, is_new = put_policy(context, caller, PolicyName(kind, project, run), body, if_match)
    made(response, is_new=is_new)
    return tagged(response, view)


@router.delete("/runs/{run}/policies/{kind}", summary="Delete a run's own policy; its project's holds from then on")
def delete_of_run(
    *, project: str, run: str, kind: PolicyKind, context: Context, caller: Operator, if_match: IfMatch = None
) -> PolicyView:
    return remove_policy(context, caller, PolicyName(kind, project, run), if_match)

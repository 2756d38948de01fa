"""Write docs/reference/access.md from the routes that the application serves: the scope that each of them asks for, and
the roles that have it.

Run it with `make docs`; tests/architecture/test_access_page.py fails while the page is not current. So a change of who
may call a route is seen in the review of the page.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fastapi.routing import iter_route_contexts

from holdfast_protocol.states import Role, Scope
from holdfast_service.app import ROUTERS
from holdfast_service.auth.principal import RequireScope
from holdfast_service.identity.rules import SCOPES_OF_ROLE
from holdfast_service.web.frame import required_by

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "access.md"

_ROLES = tuple(SCOPES_OF_ROLE)

_HEAD = f"""# Who may call what

A token has scopes, and each stands alone: none implies another. A role is a set of scopes, on one project or on every
one:

{{roles}}

"yes" in a role's column: who has the role may call it, on the projects that the role is good for. A token of one
project sees that project alone. "on every project": the call concerns all projects at once, and a token of one project
is refused. A token made by hand can have other scopes: `train` alone for a job that never reads, `metrics` alone for a
scraper.

This page is made by `make docs` from the routes themselves. The signed URLs of a posix store
(`/v1/objects/{{{{payload}}}}`) take no token: the signature is the authorization. A sweep with `force` takes `admin`
besides. Who changes the quotas of a project needs a token for every project. `DELETE /v1/tokens/current` is for the
token that a command's sign-in has made.

| call | path | scope | {" | ".join(_ROLES)} |
| --- | --- | --- |{" --- |" * len(_ROLES)}
"""


def page() -> str:
    """The whole page."""
    roles = "\n".join(f"- {role}: {_listed(sorted(scopes))}" for role, scopes in SCOPES_OF_ROLE.items())
    rows = (
        f"| {method} | `{path}` | {_scope(required)} | {_allowed(required)} |\n" for path, method, required in _rows()
    )
    return _HEAD.format(roles=roles) + "".join(rows)


def _rows() -> list[tuple[str, str, RequireScope | None]]:
    found = []
    for route in iter_route_contexts([route for router in ROUTERS for route in router.routes]):
        dependant = getattr(route, "dependant", None)
        required = None if dependant is None else next(required_by(dependant), None)
        found += [(route.path or "", method, required) for method in (route.methods or set()) - {"HEAD", "OPTIONS"}]
    return sorted(found, key=lambda row: row[:2])


def _scope(required: RequireScope | None) -> str:
    if required is None:
        return "no token"
    if required.scope is None:
        return "any token"
    return _listed([scope for scope in (required.scope, required.or_scope) if scope is not None], " or ")


def _allowed(required: RequireScope | None) -> str:
    """A cell for each role."""
    yes = "on every project" if required is not None and required.every_project else "yes"
    return " | ".join(yes if _may(role, required) else "" for role in _ROLES)


def _may(role: Role, required: RequireScope | None) -> bool:
    if required is None or required.scope is None:
        return True
    return bool(SCOPES_OF_ROLE[role] & {required.scope, required.or_scope})


def _listed(scopes: Iterable[Scope], between: str = ", ") -> str:
    return between.join(f"`{scope.value}`" for scope in scopes)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Write docs/reference/access.md from the routes that the application serves: which scope each of them asks for.

Run it with `make docs`; tests/architecture/test_access_page.py fails while the page is not current. So a change of who
may call a route is seen in the review of the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fastapi.routing import iter_route_contexts

from holdfast_service.app import ROUTERS
from holdfast_service.auth.principal import RequireScope
from holdfast_service.web.frame import required_by

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "access.md"

_HEAD = """# Who may call what

A token has scopes, and each stands alone: none implies another. A token of one project sees that project alone,
whatever its scopes are, and what concerns all projects (`/metrics`, prices, stores, quotas and the like) takes one for
every project. What a role of yours may do is the scopes of its token: `train` and `read` for a job, `read` for a person
who looks, `operate` beside it for one who edits and prunes, `admin` for projects and tokens, `metrics` for a scraper.

This page is made by `make docs` from the routes themselves. The signed URLs of a posix store
(`/v1/objects/{payload}`) take no token: the signature is the authorization. A sweep with `force` takes `admin`
besides.

| call | path | scope |
| --- | --- | --- |
"""


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(f"| {method} | `{path}` | {scope} |\n" for path, method, scope in sorted(_rows()))


def _rows() -> Iterator[tuple[str, str, str]]:
    for route in iter_route_contexts([route for router in ROUTERS for route in router.routes]):
        dependant = getattr(route, "dependant", None)
        required = None if dependant is None else next(required_by(dependant), None)
        for method in (route.methods or set()) - {"HEAD", "OPTIONS"}:
            yield route.path, method, _scope(required)


def _scope(required: RequireScope | None) -> str:
    if required is None:
        return "no token"
    if required.scope is None:
        return "any token"
    return " or ".join(f"`{scope.value}`" for scope in (required.scope, required.or_scope) if scope is not None)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

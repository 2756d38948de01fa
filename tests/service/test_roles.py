"""Each role at each route, on one project and on every one: refused where the page of accesses has no "yes"."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from holdfast_protocol.states import Role
from holdfast_service.identity.rules import SCOPES_OF_ROLE
from tests.service.test_sessions import filled, guarded_routes
from tests.support.service import RunningService

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "write_access_page.py"
_REFUSED = (403, "forbidden")
_OF_SIGN_INS = ("DELETE", "/v1/tokens/current")
"""It ends what a command's sign-in has made, and is refused to every other token."""


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("of_one_project", [True, False], ids=["one project", "every project"])
def test_a_role_is_refused_what_the_page_does_not_allow_it_and_nothing_else(
    service: RunningService, role: Role, of_one_project: bool
) -> None:
    service.make_project("mine")
    token = service.token(*SCOPES_OF_ROLE[role], project="mine" if of_one_project else None)
    http, cells = service.http(token=token), cells_of(role)
    seen, wrong = set(), []
    for method, path in guarded_routes(service):
        if method == "HEAD" or (method, path) == _OF_SIGN_INS:
            continue
        cell = cells[method, path]
        may = cell == "yes" or (cell == "on every project" and not of_one_project)
        # No body: whoever may call is refused for what is missing, and nothing happens.
        sent: dict[str, Any] = {"params": {"seconds": 0}} if path == "/v1/events/stream" else {}
        reply = http.request(method, filled(path, {"project": "mine"}), **sent)
        code = reply.json().get("code") if reply.is_error else ""
        if may == ((reply.status_code, code) == _REFUSED):
            wrong.append(f"{method} {path} answers {reply.text}")
        seen.add((method, path))
    assert not wrong
    assert len(seen) > 100


def cells_of(role: Role) -> dict[tuple[str, str], str]:
    """By method and path, what the committed page says of this role."""
    lines = runpy.run_path(str(SCRIPT))["PAGE"].read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    column = rows[0].index(role.value)
    return {(row[0], row[1].strip("`")): row[column] for row in rows[2:]}

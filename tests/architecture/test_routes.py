"""Default-deny: every route declares a scope, but for those that are listed here, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import iter_route_contexts

from holdfast_service.settings import ServiceSettings
from holdfast_service.web.admission import CLASSES
from holdfast_service.web.frame import GuardedRoute, required_by
from tests.support.service import RunningService, running_service

OPEN = {
    "/healthz": "for load balancers",
    "/readyz": "for load balancers",
    "/v1/objects/{payload}": "the signed URL is the authorization",
    "/v1/tokens/exchange": "the token of another issuer in its body says who calls",
    "/openapi.json": "the same for everybody",
    "/v1/sign-ins/providers": "a button for each provider, before anybody has signed in",
    "/v1/sign-ins": "the same for everybody: an address at a provider",
    "/v1/sign-ins/finish": "who calls is what the provider's answer says",
    "/": "leads to /ui/",
    "/ui": "leads to /ui/",
    "/ui/{path:path}": "the web page's files, the same for everybody",
}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    with running_service(ServiceSettings(data_dir=tmp_path / "data", port=0)) as running:
        yield running


@pytest.fixture
def app(service: RunningService) -> FastAPI:
    return service.app


def test_every_route_declares_who_may_call_it(app: FastAPI) -> None:
    """Walks what the application really serves, and not only what its documentation shows."""
    routes = list(iter_route_contexts(app.routes))
    assert len(routes) > 30
    for route in routes:
        dependant: Dependant | None = getattr(route, "dependant", None)
        declared = [] if dependant is None else list(required_by(dependant))
        if route.path in OPEN:
            assert not declared, f"{route.path} is on the list of open routes and asks for a token: take it off"
        else:
            assert len(declared) == 1, f"{route.methods} {route.path} declares no scope: give it `require(Scope.…)`"
            assert isinstance(route.original_route, GuardedRoute), f"{route.path}: its router has another route_class"


def test_every_class_of_calls_names_a_route_that_is_served(app: FastAPI) -> None:
    """A route that moved would else be of the last class without a word, and a seal could be refused."""
    served = {(method, route.path) for route in iter_route_contexts(app.routes) for method in route.methods or ()}
    assert CLASSES.keys() <= served


def test_every_other_route_refuses_a_call_without_a_token(service: RunningService) -> None:
    operations = [
        (method, path)
        for path, methods in service.app.openapi()["paths"].items()
        for method in methods
        if path not in OPEN
    ]
    assert len(operations) > 25
    client = service.http(token=None)
    for method, path in operations:
        reply = client.request(method, re.sub(r"{\w+}", "1", path))
        assert (reply.status_code, reply.json()["code"]) == (401, "unauthenticated"), f"{method} {path}"


@pytest.mark.rule("page-from-here")
def test_no_open_route_leads_a_browser_elsewhere(service: RunningService) -> None:
    """A script on this origin acts with the cookie of the person who has signed in. test_ui.py holds the same for the
    page's own files."""
    http = service.http(token=None)
    for path in [*OPEN, "/docs", "/redoc"]:
        reply = http.get(re.sub(r"{[^}]*}", "x", path), headers={"Accept": "text/html"}, follow_redirects=False)
        assert "text/html" not in reply.headers.get("Content-Type", "") or path.startswith("/ui"), path
        assert not re.search(r"<(script|link|img|iframe)\b[^>]*(https?:)?//", reply.text), path
        assert "Content-Security-Policy" in reply.headers, path


def test_the_list_of_open_routes_has_no_route_that_is_gone(app: FastAPI) -> None:
    assert set(OPEN) <= {route.path for route in iter_route_contexts(app.routes)}

"""The REST interface as its OpenAPI document declares it: schemathesis calls every operation, and openapi-python-client
makes a client of it that works."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import load_all_checks
from schemathesis.config import SchemathesisConfig
from schemathesis.pytest.lazy import get_all_tests

from holdfast_protocol.events import LONGEST_STREAM_SECONDS
from holdfast_service.app import openapi_document
from holdfast_service.settings import ServiceSettings
from tests.support.rank import Job
from tests.support.service import RunningService, running_service

# A refusal of the values' form: what the document should have said. A refusal of their meaning has no such list.
_FORM = "errors"
# JSON Schema cannot say these: texts without control characters, rules between fields, and 1.0, which it calls an
# integer and which is none on our wire.
_BEYOND_A_SCHEMA = (
    "Value error",
    "Input should be a valid integer",
    "Input should be less than or equal to 46116860184",
    "The default factory uses validated data",  # said beside what is really wrong
)
load_all_checks()
_EXCLUDED = [
    # _refuse_contradiction looks closer: a name that is not there, or a version that was not seen, is no contradiction.
    schemathesis.checks.positive_data_acceptance,
    # A caller with many wrong tokens is made to wait (429). tests/architecture/test_routes.py calls each route without.
    schemathesis.checks.ignored_auth,
]
# A version that was not seen is refused, with 412 or 428, before a body is judged.
_CONFIG = SchemathesisConfig.from_dict(
    {
        "checks": {"negative_data_rejection": {"expected-statuses": ["4xx", "5xx"]}},
        # What it makes up must not hang on which other tests are loaded; an unknown parameter of a query is let be.
        "analysis": {"constants": {"enabled": False}},
        "generation": {"allow-extra-parameters": False},
    }
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("schema")
    with running_service(ServiceSettings(data_dir=folder, port=0)) as running:
        Job(running.http(), "demo/gpt").save(1)
        yield running


@pytest.fixture(scope="module")
def token(service: RunningService) -> str:
    return service.token()


# Without `security`: it would leave the token out and count that as a wrong call, and each call here has it.
_SCHEMA = schemathesis.openapi.from_dict(openapi_document() | {"security": []}, config=_CONFIG)


@pytest.fixture(scope="module")
def checks() -> dict[str, Callable[..., None]]:
    """What calls each operation. `_SCHEMA.parametrize()` makes them while pytest collects, in each test process."""
    made = get_all_tests(schema=_SCHEMA, test_func=_call, settings=None, given_kwargs={})
    return {operation.label: check for operation, check in (each.ok() for each in made)}


@pytest.mark.parametrize("label", [found.ok().label for found in _SCHEMA.get_all_operations()])
def test_what_is_declared_is_what_is_done(
    label: str, checks: dict[str, Callable[..., None]], service: RunningService, token: str
) -> None:
    checks[label](service=service, token=token)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def _call(case: schemathesis.Case, service: RunningService, token: str) -> None:
    if case.path == "/v1/events/stream" and _goes_on(case.query.get("seconds", "3600")):
        case.query["seconds"] = 0  # it would be read until its end
    # A crowded machine answers late.
    response = case.call(base_url=service.url, headers={"Authorization": f"Bearer {token}"}, timeout=90)
    if response.status_code == 426:
        return  # another protocol is refused before anything else is looked at; tests/service/test_frame.py has that
    case.validate_response(response, excluded_checks=_EXCLUDED)
    _refuse_contradiction(case, response)


def _goes_on(seconds: Any) -> bool:
    return str(seconds).isascii() and str(seconds).isdecimal() and 0 < int(seconds) <= LONGEST_STREAM_SECONDS


def _refuse_contradiction(case: schemathesis.Case, response: Any) -> None:
    """What the document allows must not be refused for its form."""
    if case.meta is not None and case.meta.generation.mode.is_positive and response.status_code == 422:
        faults = response.json()["context"].get(_FORM, ())
        contradictions = [fault for fault in faults if not fault["message"].startswith(_BEYOND_A_SCHEMA)]
        if case.path.endswith("/policies/{kind}"):  # the path says which of the documents it must be
            contradictions = [fault for fault in contradictions if fault["where"][:2] != ["body", "document"]]
        assert not contradictions, contradictions


def test_a_generated_client_works(
    service: RunningService, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "openapi.json"
    document.write_text(json.dumps(openapi_document()))
    made = tmp_path / "generated"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "openapi_python_client", "generate", "--path", str(document)),
            *("--meta", "none", "--output-path", str(made / "holdfast_rest"), "--fail-on-warning"),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},  # it runs ruff
    )
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.syspath_prepend(str(made))
    client = importlib.import_module("holdfast_rest").AuthenticatedClient(base_url=service.url, token=token)
    list_runs = importlib.import_module("holdfast_rest.api.runs.runs_list")
    page = list_runs.sync(client=client, project="demo")
    assert [run.name for run in page.items] == ["gpt"]
    show = importlib.import_module("holdfast_rest.api.checkpoints.checkpoints_select")
    view = show.sync(client=client, project="demo", run="gpt", selector="latest")
    assert (view.step, view.state.value) == (1, "committed")
    put = importlib.import_module("holdfast_rest.api.projects.projects_put")
    models = importlib.import_module("holdfast_rest.models")
    made_project = put.sync_detailed(client=client, project="generated", body=models.EditProject())
    assert (made_project.status_code, made_project.parsed.name) == (201, "generated")


def test_each_method_that_a_path_lacks_is_405_with_those_that_it_has(service: RunningService) -> None:
    for path, methods in openapi_document()["paths"].items():
        filled = path.replace("{rank}", "0").replace("{number}", "1")
        reply = service.http().request("TRACE", filled.replace("{", "").replace("}", ""))
        assert (reply.status_code, reply.json()["code"]) == (405, "method_not_allowed"), path
        assert {method.upper() for method in methods} <= set(reply.headers["allow"].split(", ")), path

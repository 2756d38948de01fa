"""`holdfast retention`, `prune`, `trash`, `pin` and `policy` against a real `holdfast serve`, as people type them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner, Result

from holdfast_client import Client
from holdfast_client.cli.main import app
from holdfast_protocol.runs import EditProject
from holdfast_protocol.service import CreateToken
from holdfast_protocol.states import Scope
from tests.support.little_checkpoints import save_little_checkpoint
from tests.support.serve import ServedHoldfast, holdfast_serve


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHoldfast]:
    with holdfast_serve(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture
def target(served: ServedHoldfast, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run with the steps 1 to 4."""
    for name, value in served.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "80")
    project = f"p{secrets.token_hex(6)}"
    with Client() as client:
        client.projects.edit(project, EditProject())
        for _ in range(4):
            save_little_checkpoint(client, project)
    return f"{project}/doctor"


def run(*arguments: str, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert "Traceback" not in result.stderr + result.stdout
    assert result.exit_code == exit_code, result.stderr + result.stdout
    return result


def read(*arguments: str) -> object:
    return json.loads(run(*arguments, "--json").stdout)


def test_a_policy_is_tried_put_planned_and_applied(target: str) -> None:
    project, _ = target.split("/")
    assert "nothing ever expires" in run("retention", "plan", target).stderr
    run("retention", "policy", target, exit_code=3)
    what_if = run("retention", "plan", target, "--keep-last", "3")
    # One chunk of 64 KiB, and the index that only this checkpoint has: it names its run and step.
    assert "3 stay, 1 expires." in what_if.stdout
    assert re.search(r"^65\d\d\d bytes \(64\.\d KiB\) would be freed", what_if.stdout, re.MULTILINE)
    assert "number 1 of the newest 3" in " ".join(what_if.stdout.split())
    refused = run("retention", "policy", project, "--keep-within", "90min", exit_code=2)
    assert "no minutes" in " ".join(refused.stderr.split())
    run("retention", "policy", project, "--preset", "ring-buffer", "--keep-last", "2", "--keep-best", "loss:max:3")
    shown = run("retention", "policy", target).stdout
    assert f"of {project}, version 1" in shown
    assert "metric=loss mode=max n=3" in shown
    # Nothing reported a loss, so all of it stays for want of one, and that is told.
    assert "stay only because they have no finite value of loss" in run("retention", "plan", target).stderr
    run("retention", "policy", project, "--keep-last", "2")
    assert "Say --yes" in run("retention", "apply", target, exit_code=2).stderr
    assert "Say --yes" not in run("retention", "apply", target, "--dry-run").stderr
    assert "2 checkpoints went to the trash, until" in run("retention", "apply", target, "--yes").stdout
    assert "nothing that expires" in run("retention", "apply", target, "--yes").stderr
    run("retention", "policy", project, "--delete")
    run("policy", "show", "retention", project, exit_code=3)
    assert {one["name"] for one in read("retention", "presets")} == {"ring-buffer", "periodic-best", "tiered"}  # type: ignore[attr-defined]


def test_what_is_pruned_is_listed_and_taken_back_and_what_is_pinned_stays(target: str) -> None:
    assert "is pinned" in run("pin", f"{target}@1", "--reason", "paper", "--until", "30d").stdout
    assert "paper" in run("show", f"{target}@1").stdout
    dry = run("prune", target, "--before-step", "4", exit_code=2)
    assert "1 checkpoint would go to the trash" in dry.stdout
    assert "step 1 of attempt 1 stays: pinned" in " ".join(dry.stderr.split())
    run("prune", target, exit_code=2)
    assert "must stay: step 4" in " ".join(run("prune", f"{target}@4", "--yes", exit_code=7).stderr.split())
    assert "the trash, until" in run("prune", target, "--before-step", "4", "--reason", "spikes", "--yes").stdout
    (trashed,) = read("trash", "list", target.partition("/")[0])  # type: ignore[misc]
    assert (trashed["step"], trashed["trash_reason"]) == (2, "spikes")
    assert "spikes" in run("trash", "list", target).stdout
    assert "is committed." in run("trash", "restore", f"{target}@2").stdout
    assert "is empty" in run("trash", "list", target).stderr
    assert "is not pinned" in run("unpin", f"{target}@1").stdout


def test_a_policy_of_any_kind_is_put_from_a_file(target: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "policy.json"
    file.write_text('{"keep-last": 3}')
    assert "keep_last" in run("policy", "put", "retention", target, "--file", str(file)).stdout
    file.write_text('{"keep_lest": 3}')
    assert "did you mean" in run("policy", "put", "retention", target, "--file", str(file), exit_code=2).stderr
    run("policy", "delete", "retention", target, exit_code=2)
    run("policy", "delete", "retention", target, "--yes")
    run("policy", "delete", "retention", target, "--yes", exit_code=3)


def test_who_may_not_delete_the_project_deletes_none_of_its_runs(
    target: str, served: ServedHoldfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, _ = target.split("/")
    with Client() as client:
        theirs = client.tokens.create(CreateToken(name="of the project", scopes=list(Scope), project=project))
    monkeypatch.setenv("HOLDFAST_TOKEN", theirs.token)
    run("delete", project, "--yes", exit_code=4)
    assert [one["name"] for one in read("runs", project)] == ["doctor"]  # type: ignore[attr-defined]


def test_a_run_and_a_project_are_deleted_and_taken_back(target: str) -> None:
    project, _ = target.split("/")
    asked = run("delete", target, exit_code=2)
    assert "4 checkpoints" in asked.stdout
    assert "Nothing was deleted" in asked.stderr
    assert f"{target} would be deleted." in " ".join(run("delete", target, "--dry-run").stdout.split())
    done = " ".join(run("delete", target, "--reason", "a failed idea", "--yes").stdout.split())
    assert f"{target} is deleted. `holdfast trash restore {target}` takes it back until" in done
    assert "is deleted" in run("delete", target, "--yes").stdout
    assert read("runs", project) == []
    assert "a failed idea" in " ".join(run("runs", project, "--deleted").stdout.split())
    assert "was deleted by" in " ".join(run("show", target, exit_code=3).stderr.split())
    assert f"{target} is back: 4 checkpoints." in " ".join(run("trash", "restore", target).stdout.split())
    both = read("delete", project, "--yes")
    assert [one["run"] for one in both] == ["doctor", None]  # type: ignore[attr-defined]
    assert project in run("project", "list", "--deleted").stdout
    assert "is back: 4 checkpoints." in " ".join(run("trash", "restore", project).stdout.split())
    assert [one["name"] for one in read("runs", project)] == ["doctor"]  # type: ignore[attr-defined]

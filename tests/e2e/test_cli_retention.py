"""`retention`, `policies`, `prune`, `pin`, `delete` and `undelete` against a real `holdfast serve`."""

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
    run("policies", "show", "retention", target, exit_code=3)
    what_if = run("retention", "plan", target, "--keep-last", "3")
    # One chunk of 64 KiB, and the index that only this checkpoint has: it names its run and step.
    assert "3 stay, 1 expires." in what_if.stdout
    assert re.search(r"^65\d\d\d bytes \(64\.\d KiB\) would be freed", what_if.stdout, re.MULTILINE)
    assert "number 1 of the newest 3" in " ".join(what_if.stdout.split())
    refused = run("policies", "put", "retention", project, "--keep-within", "90min", exit_code=2)
    assert "no minutes" in " ".join(refused.stderr.split())
    run(
        "policies",
        "put",
        "retention",
        project,
        "--preset",
        "ring-buffer",
        "--keep-last",
        "2",
        "--keep-best",
        "loss:max:3",
    )
    shown = run("policies", "show", "retention", target).stdout
    assert f"of {project}, version 1" in shown
    assert "metric=loss mode=max n=3" in shown
    # Nothing reported a loss, so all of it stays for want of one, and that is told.
    assert "stay only because they have no finite value of loss" in run("retention", "plan", target).stderr
    run("policies", "put", "retention", project, "--keep-last", "2")
    assert "Say --yes" in run("retention", "apply", target, exit_code=2).stderr
    assert "Say --yes" not in run("retention", "apply", target, "--dry-run").stderr
    assert "2 checkpoints went to the trash, until" in run("retention", "apply", target, "--yes").stdout
    assert "nothing that expires" in run("retention", "apply", target, "--yes").stderr
    run("policies", "delete", "retention", project, "--yes")
    run("policies", "show", "retention", project, exit_code=3)
    assert {one["name"] for one in read("policies", "list-presets")} == {"ring-buffer", "periodic-best", "tiered"}  # type: ignore[attr-defined]


def test_what_is_pruned_is_listed_and_taken_back_and_what_is_pinned_stays(target: str) -> None:
    assert "is pinned" in run("checkpoints", "pin", f"{target}@1", "--reason", "paper", "--until", "30d").stdout
    assert "paper" in run("checkpoints", "show", f"{target}@1").stdout
    dry = run("checkpoints", "prune", target, "--before-step", "4", exit_code=2)
    assert "1 checkpoint would go to the trash" in dry.stdout
    assert "step 1 of attempt 1 stays: pinned" in " ".join(dry.stderr.split())
    run("checkpoints", "prune", target, exit_code=2)
    assert "must stay: step 4" in " ".join(
        run("checkpoints", "prune", f"{target}@4", "--yes", exit_code=7).stderr.split()
    )
    assert (
        "the trash, until"
        in run("checkpoints", "prune", target, "--before-step", "4", "--reason", "spikes", "--yes").stdout
    )
    (trashed,) = read("checkpoints", "list", target.partition("/")[0], "--deleted")  # type: ignore[misc]
    assert (trashed["step"], trashed["trash_reason"]) == (2, "spikes")
    assert "spikes" in run("checkpoints", "list", target, "--deleted").stdout
    assert "is committed." in run("checkpoints", "undelete", f"{target}@2").stdout
    assert "is empty" in run("checkpoints", "list", target, "--deleted").stderr
    assert "is not pinned" in run("checkpoints", "unpin", f"{target}@1").stdout


def test_a_policy_of_any_kind_is_put_from_a_file(target: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "policy.json"
    file.write_text('{"keep-last": 3}')
    assert "keep_last" in run("policies", "put", "retention", target, "--file", str(file)).stdout
    file.write_text('{"keep_lest": 3}')
    assert "did you mean" in run("policies", "put", "retention", target, "--file", str(file), exit_code=2).stderr
    run("policies", "delete", "retention", target, exit_code=2)
    run("policies", "delete", "retention", target, "--yes")
    run("policies", "delete", "retention", target, "--yes", exit_code=3)


def test_who_may_not_delete_the_project_deletes_none_of_its_runs(
    target: str, served: ServedHoldfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, _ = target.split("/")
    with Client() as client:
        theirs = client.tokens.create(CreateToken(name="of the project", scopes=list(Scope), project=project))
    monkeypatch.setenv("HOLDFAST_TOKEN", theirs.token)
    run("projects", "delete", project, "--yes", exit_code=4)
    assert [one["name"] for one in read("runs", "list", project)] == ["doctor"]  # type: ignore[attr-defined]


def test_a_run_and_a_project_are_deleted_and_taken_back(target: str) -> None:
    project, _ = target.split("/")
    asked = run("runs", "delete", target, exit_code=2)
    assert "4 checkpoints" in asked.stdout
    assert "Nothing was deleted" in asked.stderr
    assert f"{target} would be deleted." in " ".join(run("runs", "delete", target, "--dry-run").stdout.split())
    done = " ".join(run("runs", "delete", target, "--reason", "a failed idea", "--yes").stdout.split())
    assert f"{target} is deleted. `holdfast runs undelete {target}` takes it back until" in done
    assert "is deleted" in run("runs", "delete", target, "--yes").stdout
    assert read("runs", "list", project) == []
    assert "a failed idea" in " ".join(run("runs", "list", project, "--deleted").stdout.split())
    assert "was deleted by" in " ".join(run("checkpoints", "show", target, exit_code=3).stderr.split())
    assert f"{target} is back: 4 checkpoints." in " ".join(run("runs", "undelete", target).stdout.split())
    both = read("projects", "delete", project, "--yes")
    assert [one["run"] for one in both] == ["doctor", None]  # type: ignore[attr-defined]
    assert project in run("projects", "list", "--deleted").stdout
    assert "is back: 4 checkpoints." in " ".join(run("projects", "undelete", project).stdout.split())
    assert [one["name"] for one in read("runs", "list", project)] == ["doctor"]  # type: ignore[attr-defined]

"""`holdfast holds`, `events`, `audit`, `usage`, `costs` and `prices` against a real `holdfast serve`."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from holdfast_client import Client
from holdfast_client.cli import events as events_command
from holdfast_client.cli.main import app
from holdfast_protocol.runs import EditProject
from holdfast_protocol.service import CreateToken
from holdfast_protocol.states import Scope
from tests.support.little_checkpoints import save_little_checkpoint
from tests.support.serve import HOLDFAST, ServedHoldfast, holdfast_serve, without_holdfast_settings


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHoldfast]:
    with holdfast_serve(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(autouse=True)
def client(served: ServedHoldfast, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    for name, value in served.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "80")
    with Client() as connected:
        yield connected


@pytest.fixture(scope="module")
def saved(served: ServedHoldfast) -> str:
    """demo/doctor with three small checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in served.environment.items():
            patch.setenv(name, value)
        with Client() as connected:
            connected.projects.edit("demo", EditProject())
            for _ in range(3):
                save_little_checkpoint(connected, "demo")
    return "demo/doctor"


def run(*arguments: str, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert "Traceback" not in result.stderr + result.stdout
    assert result.exit_code == exit_code, result.stderr + result.stdout
    return result


def test_a_hold_from_its_placing_to_its_release(client: Client, saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two administrators, before anything is held: a token that the placer's line makes afterwards releases nothing.
    alice, bob = (client.tokens.create(CreateToken(name=name, scopes=list(Scope))).token for name in ("alice", "bob"))
    monkeypatch.setenv("HOLDFAST_TOKEN", alice)
    placed = json.loads(run("holds", "create", f"{saved}@latest", "--reason", "audit of 2026", "--json").stdout)
    until = run("holds", "create", saved, "--reason", "for a while", "--until", "30d").stdout
    assert "is held until 20" in until
    listed = json.loads(run("holds", "list", saved, "--json").stdout)
    assert [one["reason"] for one in listed] == ["for a while", "audit of 2026"]
    assert placed["id"] in run("holds", "list", "demo").stdout
    assert len(json.loads(run("holds", "list", f"{saved}@latest", "--json").stdout)) == 2
    assert "by alice until it is released: audit of 2026" in run("checkpoints", "show", saved).stdout
    extended = run("holds", "extend", listed[0]["id"], "--until", "2126-01-31").stdout
    assert "until 2126-01-31 00:00" in extended
    refused = run("holds", "extend", listed[0]["id"], "--until", "7d", exit_code=2)
    assert "never shortened" in refused.stderr
    refused = run("holds", "release", placed["id"], "--reason", "mine", exit_code=4)
    assert "only another person's can release it" in refused.stderr
    refused = run("holds", "create", saved, "--reason", "in the store too", "--mirror", exit_code=2)
    assert "Object Lock" in refused.stderr
    monkeypatch.setenv("HOLDFAST_TOKEN", bob)
    assert "is released" in run("holds", "release", placed["id"], "--reason", "closed").stdout
    shown = json.loads(run("holds", "list", "--all", "--json").stdout)
    assert [(one["in_force"], one["released_by"]) for one in shown] == [(True, None), (False, "bob")]


def test_events_are_shown_filtered_and_followed(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = json.loads(run("holds", "create", saved, "--reason", "seen in events", "--json").stdout)
    told = json.loads(run("audit", "list", f"{saved}@latest", "--action", "hold.", "--json", "-n", "1").stdout)
    assert [(one["action"], one["reason"], one["after"]["hold"]) for one in told] == [
        ("hold.place", "seen in events", hold["id"])
    ]
    by_id = run("audit", "list", f"{saved}@{hold['checkpoint_id']}", "--action", "hold.", "--json", "-n", "1").stdout
    assert json.loads(by_id) == told
    refused = run("audit", "list", f"{saved}~{'0' * 32}", exit_code=3)
    assert f"There is no run {saved}~" in refused.stderr, "what a purged run is called is asked for"
    monkeypatch.setenv("COLUMNS", "200")
    text = run("audit", "list", "demo", "--people", "--since", "1h").stdout
    assert all(word in text for word in ("project.create", "hold.place"))
    assert "no such events" in run("audit", "list", saved, "--action", "nothing.").stderr
    assert "no such events" in run("audit", "list", saved, "--until", "2026-01-01").stderr

    polls = itertools.count()

    def poll(_: float) -> None:
        """Stands for the two seconds between two looks: something happens, and then the user has enough."""
        if next(polls) == 0:
            run("holds", "create", saved, "--reason", "while looking")
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(events_command.time, "sleep", poll)
    seen = CliRunner().invoke(app, ["audit", "follow", saved, "--json", "-n", "1"]).stdout
    assert [json.loads(line)["reason"] for line in seen.splitlines()] == ["seen in events", "while looking"]


def test_what_happens_is_listed_and_followed(saved: str, served: ServedHoldfast) -> None:
    committed = ("--type", "checkpoint.committed")
    told = json.loads(run("events", "list", saved, *committed, "--json").stdout)
    assert [(each["type"], each["data"]["step"]) for each in told[:1]] == [("checkpoint.committed", 3)]
    assert "checkpoint.committed" in run("events", "list", "demo").stdout.replace("\n", "")
    assert json.loads(run("events", "list", saved, *committed, "--since", "1h", "--json").stdout) == told
    assert "no such events" in run("events", "list", saved, "--until", "2026-01-01").stderr
    assert "no such events" in run("events", "list", saved, "--type", "drill.failed").stderr
    assert "There is no event 'nothing'" in run("events", "list", "--type", "nothing", exit_code=2).stderr
    assert run("events", "list", "demo/mistyped", exit_code=3)
    follow = [HOLDFAST, "events", "follow", saved, *committed, "--after", told[1]["id"]]
    for form in ((), ("--json",)):
        with subprocess.Popen(
            [*follow, *form], env=without_holdfast_settings() | served.environment, stdout=subprocess.PIPE, text=True
        ) as follows:
            assert follows.stdout is not None
            line = follows.stdout.readline()  # at once, although nobody ends it
            follows.kill()
        assert told[0]["id"] in line
    assert json.loads(line) == told[0]


def test_usage_cost_and_prices(saved: str, tmp_path: Path) -> None:
    usage = json.loads(run("usage", "show", "demo", "--json").stdout)
    parts = ("committed_bytes", "arriving_bytes", "trashed_bytes", "pending_collection_bytes")
    assert usage["stored_bytes"] == sum(usage[part] for part in parts) > 0
    for arguments in (["usage", "list"], ["usage", "show", "demo"], ["usage", "show", saved]):
        text = run(*arguments).stdout
        assert "trashed" in text
    assert "costs nothing" in run("prices", "show").stdout.replace("\n", " ")
    shown = json.loads(run("prices", "show", "--json").stdout)
    assert shown["is_default"]
    shown["prices"]["prices"][-1]["per_gib_month"] = 100.0
    shown["prices"]["source"] = "the bill of our own disks"
    (tmp_path / "prices.json").write_text(json.dumps(shown), encoding="utf-8")
    assert "the bill of our own disks" in run("prices", "put", "--file", str(tmp_path / "prices.json")).stdout.replace(
        "\n", " "
    )
    cost = json.loads(run("costs", "show", saved, "--json").stdout)
    assert cost["per_month"] > 0
    assert "USD a month, for storing alone" in run("costs", "show", "demo").stdout
    forecast = json.loads(run("costs", "forecast", saved, "--retention", "ring-buffer", "--json").stdout)
    assert forecast["kept_checkpoints"] == 5
    assert "By its last 3 saves" in run("costs", "forecast", saved, "--retention", "tiered").stdout
    shown["prices"]["prices"].pop()
    (tmp_path / "prices.json").write_text(json.dumps(shown), encoding="utf-8")
    run("prices", "put", "--file", str(tmp_path / "prices.json"))
    for command in ("show", "forecast"):
        assert "have no price and are not counted" in run("costs", command, saved).stdout
    run("costs", "forecast", "demo", exit_code=2)
    (tmp_path / "wrong.json").write_text('{"keep_lots": 3}', encoding="utf-8")
    assert (
        "keep_lots" in run("costs", "forecast", saved, "--retention", str(tmp_path / "wrong.json"), exit_code=2).stderr
    )

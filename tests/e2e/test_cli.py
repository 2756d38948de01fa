"""The commands against a real `holdfast serve`: what they print, in both forms, and how they end."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast_client import Client, ClientSettings, errors
from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.chunks.uploader import ShardUploader
from holdfast_client.cli.main import app
from holdfast_protocol.attempts import Heartbeat
from holdfast_protocol.base import Fence, RunName
from holdfast_protocol.checkpoints import AbortCheckpoint, BeginCheckpoint, EditCheckpoint
from holdfast_protocol.digests import chunk_digest
from holdfast_protocol.runs import EditProject
from holdfast_protocol.service import CreateToken
from holdfast_protocol.states import Health, Scope
from tests.support.little_checkpoints import save_little_checkpoint
from tests.support.serve import HOLDFAST, ServedHoldfast, holdfast_serve


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[ServedHoldfast]:
    with holdfast_serve(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(autouse=True)
def client(served, monkeypatch) -> Iterator[Client]:
    for name, value in served.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "80")
    with Client() as connected:
        yield connected


@pytest.fixture
def project(client) -> str:
    name = f"p{secrets.token_hex(6)}"
    client.projects.edit(name, EditProject())
    return name


def save_samples(client: Client, project: str, count: int) -> RunName:
    """`count` little checkpoints in project/doctor, at steps 1, 2, …"""
    for _ in range(count):
        save_little_checkpoint(client, project)
    return RunName(project, "doctor")


def run(*arguments: str, exit_code: int = 0):
    result = CliRunner().invoke(app, list(arguments))
    assert "Traceback" not in result.stderr + result.stdout
    assert result.exit_code == exit_code, result.stderr + result.stdout
    return result


def read(*arguments: str):
    return json.loads(run(*arguments, "--json").stdout)


def test_doctor_finds_a_sound_service_sound_and_leaves_nothing_behind(client):
    before = [read("projects", "list"), read("runs", "list")]
    findings = {one["check"]: one for one in read("doctor")}
    assert {one["verdict"] for one in findings.values()} == {"ok"}, findings
    asked = {"url", "service", "protocol", "token", "clock", "database", "migrations", "store"}
    assert set(findings) >= asked | {"store clock", "round trip"}
    assert "this machine sees the store's mount" in findings["round trip"]["detail"]
    assert re.search(r"^round trip +ok", run("doctor").stdout, re.MULTILINE)
    assert [read("projects", "list"), read("runs", "list")] == before


def test_doctor_without_the_mount_goes_over_http(monkeypatch):
    monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")
    assert "mount" not in read("doctor")[-1]["detail"]


def test_doctor_with_a_token_that_may_not_write_skips_the_round_trip(client, monkeypatch):
    made = client.tokens.create(CreateToken(name="reader", scopes=[Scope.READ]))
    monkeypatch.setenv("HOLDFAST_TOKEN", made.token)
    last = read("doctor")[-1]
    assert (last["check"], last["verdict"]) == ("round trip", "skipped")
    assert "scope train" in last["detail"]


def test_doctor_with_a_trainers_token_makes_the_whole_round_trip(client, monkeypatch, project):
    made = client.tokens.create(CreateToken(name="trainer", scopes=[Scope.TRAIN], project=project))
    monkeypatch.setenv("HOLDFAST_TOKEN", made.token)
    last = read("doctor")[-1]
    assert last["verdict"] == "ok", last


def test_doctor_says_what_to_mend(monkeypatch):
    monkeypatch.setenv("HOLDFAST_TOKEN", "hold_0123456789abcdef_wrong")
    refused = run("doctor", exit_code=4).stdout
    assert re.search(r"token +failed", refused)
    assert "HOLDFAST_TOKEN" in refused
    monkeypatch.setenv("HOLDFAST_URL", "http://127.0.0.1:9")
    away = run("doctor", exit_code=5).stdout
    assert re.search(r"service +failed", away)
    assert "holdfast serve" in away


def test_runs_attempts_and_checkpoints_are_listed_and_shown(client, project):
    name = save_samples(client, project, 3)
    assert [(one["name"], one["latest_attempt"]) for one in read("runs", "list", project)] == [("doctor", 3)]
    assert str(name) in run("runs", "list").stdout
    assert [one["number"] for one in read("attempts", "list", str(name))] == [3, 2, 1]
    assert "finished" in run("attempts", "list", str(name)).stdout
    assert "gave no configuration" in run("attempts", "show-config", str(name)).stdout
    assert [one["step"] for one in read("checkpoints", "list", str(name))] == [3, 2, 1]
    assert [one["step"] for one in read("checkpoints", "list", str(name), "--min-step", "2", "--max-step", "2")] == [2]
    assert [one["step"] for one in read("checkpoints", "list", str(name), "--since", "1h")] == [3, 2, 1]
    assert read("checkpoints", "list", str(name), "--before", "1h") == []
    shown = read("checkpoints", "show", f"{name}@2")
    client.checkpoints.edit(shown["id"], EditCheckpoint(labels=["keep"]), shown["etag"])
    assert [one["step"] for one in read("checkpoints", "list", str(name), "--label", "keep")] == [2]
    assert read("checkpoints", "list", str(name), "--state", "aborted") == []
    assert "no such checkpoints" in run("checkpoints", "list", str(name), "--health", "corrupt").stderr
    text = run("checkpoints", "show", f"{name}@2#2").stdout
    assert re.search(r"^step +2$", text, re.MULTILINE)
    assert re.search(r"^labels +keep$", text, re.MULTILINE)
    assert read("checkpoints", "show", f"{name}@{shown['id']}")["step"] == 2
    assert read("checkpoints", "show", str(name))["step"] == 3


def test_a_run_is_forked_and_says_so(client, project):
    name = save_samples(client, project, 2)
    new = f"{project}/new"
    deadline = time.monotonic() + 60
    while (tried := CliRunner().invoke(app, ["runs", "fork", f"{name}@1", new])).exit_code:
        assert "holdfast scrubs start" in tried.stderr, "the service reads first what came by the mount"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert re.search(rf"^forked from +{name}@1#1$", tried.stdout, re.MULTILINE)
    assert read("runs", "fork", f"{name}@1", new)["restore_point"]["step"] == 1, "again, it is the same one"
    assert "already, forked from" in run("runs", "fork", f"{name}@2", new, exit_code=7).stderr
    assert "of two projects" in run("runs", "fork", str(name), "other/new", exit_code=2).stderr
    assert re.search(rf"^forked from +{name}@1#1$", run("runs", "show", new).stdout, re.MULTILINE)
    assert re.search(rf"^forked from +{name}@1#1$", run("checkpoints", "show", new).stdout, re.MULTILINE)
    assert "forked from" not in run("runs", "show", str(name)).stdout
    assert [one["name"] for one in read("runs", "list", project, "--forked-from", str(name))] == ["new"]
    assert "Nothing was forked" in run("runs", "list", project, "--forked-from", "new").stderr


def test_a_run_is_tagged_found_and_its_curves_are_plotted(client, project):
    name = save_samples(client, project, 1)
    run("runs", "edit", str(name), exit_code=2)
    assert "letters, digits" in run("runs", "edit", str(name), "--tag", "a b", exit_code=2).stderr
    assert read("runs", "edit", str(name), "--tag", "b", "--tag", "a", "--note", "as in the paper")["tags"] == [
        "a",
        "b",
    ]
    assert re.search(r"^tags +b$", run("runs", "edit", str(name), "--untag", "a").stdout, re.MULTILINE)
    assert re.search(r"^note +as in the paper$", run("runs", "show", str(name)).stdout, re.MULTILINE)
    assert [one["name"] for one in read("runs", "list", project, "--tag", "b")] == [name.run]
    assert "--tag a" in run("runs", "list", project, "--tag", "a").stderr
    assert "ckpt.step" in run("runs", "history", str(name)).stderr
    opened = client.attempts.open_next(name, "measuring", world_size=1)
    fence = {"epoch": opened.epoch, "attempt": opened.attempt}
    told = {"loss": [(step, 10.0 / step) for step in range(1, 100)] + [(100, "nan")], "lr": [(1, 0.1)]}
    client.attempts.heartbeat(name.project, name.run, opened.attempt, Heartbeat(**fence, step=100, metrics=told))
    plot = run("runs", "history", str(name)).stdout
    assert re.search(r"^loss +100 +1 +100 +nan +0\.10101 +10 +nan at 100$", plot, re.MULTILINE)
    assert re.search(r"^ +10 \|\*", plot, re.MULTILINE)
    found = read("runs", "history", str(name), "--metric", "loss", "--from-step", "5", "--to-step", "6")
    assert [(point["step"], point["value"]) for point in found["metrics"][0]["points"]] == [(5, 2.0), (6, 10 / 6)]
    assert "curves of: loss, lr" in run("runs", "history", str(name), "--metric", "speed").stderr
    assert read("runs", "history", str(name), "--attempt", "1")["metrics"][0]["points"] == []


def test_the_restore_point_tells_why_newer_ones_are_skipped(client, project):
    name = save_samples(client, project, 2)
    assert (
        read("checkpoints", "edit", f"{name}@2", "--health", "quarantined", "--reason", "loss looks [odd]")["health"]
        == "quarantined"
    )
    decision = read("runs", "restore-point", str(name))
    assert decision["restore_point"]["step"] == 1
    assert [(one["step"], one["reason"]) for one in decision["skipped"]] == [(2, "quarantined")]
    text = run("runs", "restore-point", str(name)).stdout
    assert f"{name}@1#1" in text
    assert re.search(r"2 +2 +quarantined .*\[odd\]", text, re.DOTALL)
    assert "is ok, and was quarantined" in run("checkpoints", "edit", f"{name}@2", "--health", "ok").stdout.replace(
        "\n", " "
    )
    assert read("runs", "restore-point", str(name))["restore_point"]["step"] == 2


def test_a_metric_can_be_given_later(client, project):
    name = save_samples(client, project, 2)
    edited = read("checkpoints", "edit", f"{name}@1", "--metric", "accuracy=0.9", "--metric", "gap=nan")
    assert (edited["metrics"]["accuracy"]["value"], edited["metrics"]["gap"]["nonfinite"]) == (0.9, "nan")
    assert read("checkpoints", "show", f"{name}@best:accuracy:max")["step"] == 1
    text = run("checkpoints", "edit", f"{name}@1", "--metric", "gap=", "--metric", "accuracy=1e-3").stdout
    assert text.splitlines()[0].endswith("gap: taken away")
    assert text.splitlines()[1].endswith("accuracy: 0.001")
    for wrong in ((), ("--metric", "accuracy"), ("--metric", "=1"), ("--metric", "accuracy=much")):
        run("checkpoints", "edit", f"{name}@1", *wrong, exit_code=2)


@pytest.mark.rule("no-silent-fresh-start")
def test_no_restore_point_is_exit_code_3_with_the_reason(client, project):
    client.runs.create(project, "fresh")
    empty = run("runs", "restore-point", f"{project}/fresh", exit_code=3)
    assert "nothing was ever committed" in empty.stderr
    name = save_samples(client, project, 1)
    only = client.checkpoints.select(name.project, name.run, "1")
    client.checkpoints.edit(only.id, EditCheckpoint(health=Health.QUARANTINED, health_reason="no"), only.etag)
    none = run("runs", "restore-point", str(name), exit_code=3)
    assert "none of its checkpoints can be restored" in none.stderr
    assert "quarantined" in none.stdout
    assert json.loads(CliRunner().invoke(app, ["runs", "restore-point", str(name), "--json"]).stdout)["ever_committed"]
    assert run("runs", "restore-point", f"{project}/mistyped", exit_code=3).stderr


def test_projects_are_made_listed_and_limited(project):
    name = f"{project}-2"
    assert re.search(r"^quota +93.1 GiB$", run("projects", "create", name, "--quota", "100GB").stdout, re.MULTILINE)
    assert {one["name"]: one["quota_bytes"] for one in read("projects", "list")}[name] == 100 * 10**9
    assert read("projects", "edit", name, "--quota", "none")["quota_bytes"] is None
    assert {one["name"]: one["quota_bytes"] for one in read("projects", "list")}[name] is None
    run("projects", "edit", "mistyped", "--quota", "1GB", exit_code=3)
    assert "mistyped" not in run("projects", "list").stdout


def test_a_token_is_shown_once_works_and_ends_when_it_is_revoked(monkeypatch, project):
    made = run("tokens", "create", "ci", "--scope", "read", "--scope", "train", "--project", project)
    token = made.stdout.strip()
    assert token.startswith("hold_")
    assert token not in made.stderr
    (listed,) = [one for one in read("tokens", "list") if one["id"] == token.split("_")[1]]
    assert (listed["scopes"], listed["project"]) == (["read", "train"], project)
    assert token.split("_")[2] not in run("tokens", "list").stdout
    with Client(ClientSettings(token=token)) as ours:
        assert ours.service.info().token_name == "ci"
        assert read("tokens", "revoke", listed["id"])["revoked_at"]
        with pytest.raises(errors.Unauthenticated, match="revoked"):
            ours.service.info()
    run("tokens", "revoke", "0123456789abcdef", exit_code=3)


def test_a_token_is_replaced_and_whoami_tells_whose_it_is(client, monkeypatch, project):
    old = client.tokens.create(CreateToken(name="nightly", scopes=[Scope.READ], project=project))
    made = run("tokens", "rotate", old.id, "--overlap", "2h", "--expires", "4w")
    assert old.id in made.stderr
    monkeypatch.setenv("HOLDFAST_TOKEN", made.stdout.strip())
    shown = run("whoami").stdout
    for told in ("nightly", project, "read"):
        assert told in shown
    assert "replace it" not in shown + run("whoami").stderr
    told = read("whoami")
    assert (told["token_name"], told["token_id"] != old.id, told["token_ends_soon"]) == ("nightly", True, False)
    run("tokens", "rotate", old.id, exit_code=4)


def test_doctor_and_whoami_say_that_the_token_ends_soon(client, monkeypatch):
    told = client.service.info()
    soon = told.model_copy(update={"token_expires_at": told.now, "token_ends_soon": True})
    monkeypatch.setattr("holdfast_client.resources.service.Service.info", lambda _: soon)
    assert f"holdfast tokens rotate {told.token_id}" in " ".join(run("whoami").stderr.split())
    (finding,) = [each for each in read("doctor") if each["check"] == "token"]
    assert finding["verdict"] == "warning"
    assert told.token_id in finding["remedy"]


def test_a_token_without_the_scope_is_exit_code_4_and_names_it(client, monkeypatch):
    made = client.tokens.create(CreateToken(name="trainer", scopes=[Scope.TRAIN]))
    monkeypatch.setenv("HOLDFAST_TOKEN", made.token)
    refused = run("tokens", "list", exit_code=4)
    assert "'admin'" in refused.stderr


def test_a_closed_pipe_is_no_error(client, project):
    save_samples(client, project, 1)
    done = subprocess.run(
        f"{HOLDFAST} checkpoints list {project}/doctor --json | head -c 1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "["
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("direct_files", [True, False])
def test_many_chunks_go_up_and_come_down_through_the_real_service(client, project, direct_files):
    with Client(ClientSettings(direct_files=direct_files)) as ours:
        opened = ours.attempts.open_next(RunName(project, "many"), secrets.token_hex(8), world_size=1, create=True)
        fence = Fence(epoch=opened.epoch, attempt=opened.attempt)
        begun = ours.checkpoints.begin(project, "many", BeginCheckpoint(**fence.model_dump(), step=0, world_size=1))
        bodies = {chunk_digest(body): body for body in (os.urandom(5000 + n) for n in range(1200))}
        done = ShardUploader(ours, begun.id, 0, fence).upload(map(OutgoingChunk.of, bodies.values()))
        assert (done.chunks, done.sent_chunks) == (1200, 1200)
        again = ShardUploader(ours, begun.id, 0, fence).upload(map(OutgoingChunk.of, bodies.values()))
        assert again.sent_chunks == 0


def test_doctor_and_a_little_checkpoint_go_straight_to_s3(tmp_path: Path, monkeypatch):
    with holdfast_serve(tmp_path, store="s3", database="postgres") as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        findings = {one["check"]: one for one in read("doctor")}
        assert {one["verdict"] for one in findings.values()} == {"ok"}, findings
        assert "mount" not in findings["round trip"]["detail"]
        with Client() as ours:
            save_little_checkpoint(ours, "demo")


def test_background_work_is_shown_paused_and_done_now():
    assert {"reap", "collect", "operations"} <= {one["name"] for one in read("controllers", "list")}
    assert re.search(r"^collect +active", run("controllers", "list").stdout, re.MULTILINE)
    run("controllers", "pause", "collect", "--reason", "the store moves")
    assert re.search(r"^collect +paused", run("controllers", "list").stdout, re.MULTILINE)
    assert "the store moves" in run("controllers", "show", "collect").stdout
    refused = run("controllers", "run", "collect", exit_code=7)
    assert "holdfast controllers resume collect" in refused.stderr
    assert read("controllers", "resume", "collect")["paused_at"] is None
    done = read("controllers", "run", "collect", "--wait")
    assert done["run_requested_at"] is None
    assert done["run_answered_at"] <= done["last_pass_at"]
    assert "is asked for" in run("controllers", "run", "repair").stdout
    assert "collect" in run("controllers", "show", "no-such", exit_code=3).stderr
    assert {(one["kind"], one["silent"]) for one in read("workers", "list")} == {("serve", False)}
    assert " alive " in run("workers", "list").stdout


def test_a_long_operation_is_listed_waited_for_and_cancelled(client, project):
    name = save_samples(client, project, 1)
    started = client.scrubs.run(name.project, name.run)
    waited = read("operations", "wait", started.id)
    assert (waited["state"], waited["result"]["bad"]) == ("done", 0)
    assert [one["id"] for one in read("operations", "list", project)] == [started.id]
    assert re.search(rf"^{started.id} +scrub +{project}/doctor +done", run("operations", "list").stdout, re.MULTILINE)
    shown = run("operations", "show", started.id).stdout
    assert re.search(r"^state +done", shown, re.MULTILINE)
    assert re.search(r"^bad +0", shown, re.MULTILINE)
    assert read("operations", "cancel", started.id)["state"] == "done", "it has ended, and stays as it ended"
    assert "holdfast operations list" in run("operations", "show", "op_none", exit_code=3).stderr
    client.controllers.pause("operations", "to cancel one before it is begun")
    cancelled = client.scrubs.run(name.project, name.run)
    run("operations", "cancel", cancelled.id)
    client.controllers.resume("operations")
    assert "cancelled" in run("operations", "wait", cancelled.id, exit_code=1).stderr


def test_garbage_is_shown_collected_and_swept(client, project, served):
    save_samples(client, project, 1)
    run_name = RunName(project, "given-up")
    opened = client.attempts.open_next(run_name, "launch", world_size=1, create=True)
    fence = Fence(epoch=opened.epoch, attempt=opened.attempt)
    begun = client.checkpoints.begin(project, "given-up", BeginCheckpoint(**fence.model_dump(), step=0, world_size=1))
    ShardUploader(client, begun.id, 0, fence).upload([OutgoingChunk.of(b"given up")])
    assert "waits for upload" in run("collections", "plan", project).stdout
    client.checkpoints.abort(begun.id, AbortCheckpoint(**fence.model_dump(), reason="enough"))
    (store,) = read("collections", "plan", project)["stores"]
    assert (store["copies"], [one["waits_for"] for one in store["waiting"]]) == (0, ["ticket"])
    assert re.search(r"^deleted +0 copies", run("collections", "start").stdout, re.MULTILINE)
    assert read("collections", "start")["result"]["problems"] == []
    assert re.search(r"^primary +\d+ +0 ", run("sweeps", "start", "--dry-run").stdout, re.MULTILINE)
    asked = run("sweeps", "start", "--force", exit_code=2)
    assert "Nothing was deleted. Say --yes if you mean it." in asked.stderr
    (swept,) = read("sweeps", "start", "--store", "primary", "--force", "--yes")["result"]["stores"]
    assert (swept["deleted"], swept["stopped"], swept["dry_run"]) == (0, None, False)
    assert "has no second store" in run("sweeps", "start", "--store", "second", exit_code=2).stderr

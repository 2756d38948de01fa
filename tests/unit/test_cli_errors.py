"""Every failure of a command is one or two plain lines on stderr and a documented exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from holdfast_client.cli import arguments
from holdfast_client.cli import main as plugins
from holdfast_client.cli.main import app
from holdfast_client.cli.output import ExitCode
from holdfast_client.transport import Backoff
from tests.support.scripted_http import Reply, as_json, in_turn, problem, scripted


def run(*arguments: str):
    result = CliRunner().invoke(app, list(arguments))
    assert "Traceback" not in result.stderr + result.stdout
    return result


@pytest.fixture(autouse=True)
def _settings(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_TOKEN", "hold_id_secret")
    monkeypatch.setenv("HOLDFAST_RETRY_SECONDS", "0")
    monkeypatch.setenv("HOLDFAST_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("invalid_request", ExitCode.USAGE),
        ("run_not_found", ExitCode.NOT_FOUND),
        ("no_restore_point", ExitCode.NOT_FOUND),
        ("unauthenticated", ExitCode.TOKEN),
        ("forbidden", ExitCode.TOKEN),
        ("store_unavailable", ExitCode.UNAVAILABLE),
        ("busy", ExitCode.UNAVAILABLE),
        ("checksum_mismatch", ExitCode.INTEGRITY),
        ("stale_attempt", ExitCode.STALE),
        ("edit_conflict", ExitCode.STALE),
        ("quota_exceeded", ExitCode.FAILED),
        ("internal", ExitCode.FAILED),
    ],
)
def test_the_exit_code_tells_the_kind_of_the_failure(monkeypatch, code, exit_code):
    with scripted(in_turn(problem(code, "It is so. Do this."))) as server:
        monkeypatch.setenv("HOLDFAST_URL", server.url)
        result = run("checkpoints", "show", "demo/gpt")
    assert result.exit_code == exit_code
    assert result.stdout == ""
    assert "It is so. Do this." in result.stderr
    assert "req-of-the-service" in result.stderr
    assert len(result.stderr.splitlines()) <= 2


def test_every_exit_code_is_documented():
    documented = dict(re.findall(r"^ *\| (\d+) \| (.+) \|$", ExitCode.__doc__ or "", re.MULTILINE))
    assert sorted(map(int, documented)) == sorted(ExitCode)


def test_an_absent_service_is_said_with_what_to_do(monkeypatch):
    monkeypatch.setenv("HOLDFAST_URL", "http://127.0.0.1:9")
    result = run("runs", "list")
    assert result.exit_code == ExitCode.UNAVAILABLE
    assert "holdfast serve" in result.stderr


def test_a_wrong_setting_is_named(monkeypatch):
    monkeypatch.setenv("HOLDFAST_URL", "localhost:8400")
    result = run("runs", "list")
    assert result.exit_code == ExitCode.USAGE
    assert "HOLDFAST_URL" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("checkpoints", "show", "gpt"),
        ("checkpoints", "show", "demo/gpt@yesterday"),
        ("runs", "restore-point", "demo/gpt@best"),
        ("checkpoints", "list", "demo/gpt", "--state", "nice"),
        ("checkpoints", "list", "demo/gpt", "--min-step", "-1"),
        ("attempts",),
        ("attempts", "list"),
        ("tokens", "create", "me", "--scope", "everything"),
        ("tokens", "create", "me", "--scope", "read", "--expires", "soon"),
        ("tokens", "create", "me", "--scope", "read", "--project", "two words"),
        ("projects", "create", "demo", "--quota", "much"),
        ("projects", "edit", "demo"),
        ("projects", "edit", "demo", "--quota-runs", "many"),
        ("tokens", "create", "me", "--scope", "read", "--requests-per-second", "0"),
        ("tokens", "rotate", "0123456789abcdef", "--overlap", "never"),
        ("tokens", "rotate", "0123456789abcdef", "--overlap", "0m"),
        ("tokens", "rotate", "0123456789abcdef", "--overlap", "91d"),
        ("checkpoints", "prune", "demo/gpt", "--before-step", "5", "--older-than", "never"),
        ("nonsense",),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(arguments):
    result = run(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert result.stderr


def test_a_bug_is_one_line_that_says_how_to_see_it(monkeypatch):
    broken = {"items": [{"id": "x"}], "next_cursor": None}
    with scripted(in_turn(as_json(broken))) as server:
        monkeypatch.setenv("HOLDFAST_URL", server.url)
        assert run("runs", "list").exit_code == ExitCode.FAILED
    monkeypatch.setattr("holdfast_client.cli.runs.connect", lambda: 1 / 0)
    result = run("runs", "list")
    assert result.exit_code == ExitCode.FAILED
    assert "HOLDFAST_DEBUG=1" in result.stderr


def test_what_the_service_says_of_a_pull_moves_no_cursor(monkeypatch, tmp_path):
    nothing = {"restore_point": None, "skipped": [], "ever_committed": False, "note": "away: \x1b[2Jcold"}
    with scripted(in_turn(as_json(nothing))) as server:
        monkeypatch.setenv("HOLDFAST_URL", server.url)
        result = run("checkpoints", "pull", "demo/gpt", str(tmp_path / "out"))
    assert result.exit_code == ExitCode.NOT_FOUND
    assert "away: \N{REPLACEMENT CHARACTER}[2Jcold" in result.stderr
    assert "\x1b" not in result.stderr


def test_another_program_at_the_url_is_named(monkeypatch):
    with scripted(in_turn(Reply(200, b"<html>", protocol=None))) as server:
        monkeypatch.setenv("HOLDFAST_URL", server.url)
        result = run("runs", "list")
    assert result.exit_code == ExitCode.FAILED
    assert "not a Holdfast service" in result.stderr


class _Absent:
    def __init__(self, name: str, module: str) -> None:
        self.name = name
        self.value = f"{module}:register"
        self._module = module

    def load(self):
        raise ModuleNotFoundError(f"No module named {self._module!r}", name=self._module)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("torch", 'pip install "holdfast[torch]"'),
        ("fastapi", 'pip install "holdfast[service]"'),
        ("elsewhere", "needs elsewhere"),
    ],
)
def test_a_plug_in_whose_extra_is_missing_says_which_one(monkeypatch, module, said):
    def points(*, group, name=None):
        return [_Absent("fetchall", module)]

    monkeypatch.setattr(plugins, "entry_points", points)
    result = run("fetchall", "--whatever", "x")
    assert result.exit_code == ExitCode.USAGE
    assert said in result.stderr
    assert "fetchall" in run("--help").stdout


def test_the_help_lists_all_commands_and_plug_ins_within_80_columns():
    text = run("--help").stdout
    for command in (
        "attempts",
        "checkpoints",
        "doctor",
        "launch",
        "projects",
        "runs",
        "serve",
        "tokens",
    ):
        assert re.search(rf"^  {command} ", text, re.MULTILINE), command
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("runz",), "Did you mean `holdfast runs`"),
        (("show",), "`holdfast NOUN show`, with projects, runs, checkpoints"),
        (("nonsense",), "There are: admin, agent, attempts, audit"),
        (("runs", "ls"), "`holdfast runs` has: list, show, fork, edit, delete, undelete, restore-point"),
        (("runs",), "restore-point"),
        (("admin",), "create-token"),
    ],
)
def test_a_mistyped_command_or_a_noun_alone_shows_what_there_is(arguments, said):
    result = run(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert said in result.stderr + result.stdout


def test_the_help_needs_neither_the_http_stack_nor_the_service():
    """Its time is import time: 0.2 s of CPU without these, 2 s with them."""
    code = (
        "import sys; from holdfast_client.cli.main import app; app(['--help'], standalone_mode=False); "
        "sys.exit(str({'httpx', 'pydantic', 'fastapi', 'sqlalchemy', 'torch'} & {*sys.modules} or '') or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_service_that_is_down_is_said_once_and_at_once(monkeypatch):
    busy, runs = problem("busy", "It is so. Do this."), as_json({"items": [], "next_cursor": None})
    monkeypatch.setenv("HOLDFAST_RETRY_SECONDS", "90")
    monkeypatch.setattr(arguments, "LONGEST_RETRY_SECONDS", 60.0)  # three calls of a crowded machine may take 5 s
    with scripted(in_turn(busy, busy, runs)) as server:
        monkeypatch.setenv("HOLDFAST_URL", server.url)
        result = run("runs", "list", "demo")
    assert result.exit_code == 0
    assert result.stderr.count("It is so. Do this. Retrying for 60 seconds...") == 1


def test_what_waits_is_told_before_the_pause():
    happened = []
    backoff = Backoff(60, lambda seconds: happened.append("pause"))
    assert backoff.pause(before=lambda: happened.append("told"))
    assert happened == ["told", "pause"]
    assert not Backoff(0, happened.append).pause(1, before=lambda: happened.append("told in vain"))
    assert happened == ["told", "pause"]


def test_listing_runs_and_comparing_checkpoints_never_load_torch():
    code = (
        "import sys; from holdfast_client.cli.main import app; import holdfast_client.comparison\n"
        "for verb in ('runs', 'list'), ('checkpoints', 'diff'): app([*verb, '--help'], standalone_mode=False)\n"
        "sys.exit(str({'torch', 'numpy', 'fsspec', 'holdfast_client.agent'} & {*sys.modules} or '') or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_json_is_all_that_is_printed_and_a_row_is_one_line(monkeypatch):
    long = "x" * 100
    run_view = {
        "id": "r",
        "project": long,
        "name": long,
        "created_at": "2025-01-01T00:00:00Z",
        "latest_attempt": 12345,
        "committed_checkpoints": 123456,
        "newest_step": 10**9,
        "restore_point": {
            "checkpoint_id": "ck_" + "0" * 32,
            "step": 10**9,
            "attempt": 7,
            "world_size": 8,
            "digest": "0" * 64,
            "logical_bytes": 10**12,
            "committed_at": "2025-01-01T00:00:00Z",
        },
    }
    with scripted(in_turn(as_json({"items": [run_view], "next_cursor": None}))) as server:
        monkeypatch.setenv("HOLDFAST_URL", server.url)
        table = run("runs", "list", "demo")
        document = run("runs", "list", "demo", "--json")
    assert table.exit_code == 0
    (_, row) = table.stdout.splitlines()
    assert f"{long}/{long} " in row
    assert "1000000000" in row
    assert json.loads(document.stdout)[0]["restore_point"]["step"] == 10**9

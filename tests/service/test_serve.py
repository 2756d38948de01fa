"""`holdfast serve` and `holdfast admin` as real processes."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.ports import free_ports
from tests.support.processes import ServerProcess
from tests.support.serve import (
    HOLDFAST,
    holdfast_serve,
    is_ready,
    request_without_its_body,
    run_holdfast,
    without_holdfast_settings,
)


def test_without_settings_it_serves_its_data_folder_and_ends_on_sigterm(tmp_path: Path) -> None:
    with holdfast_serve(tmp_path, forked=False) as served:
        token = (tmp_path / "data" / "token").read_text().strip()
        info = httpx.get(f"{served.url}/v1/service", timeout=60, headers={"Authorization": f"Bearer {token}"}).json()
        assert info["store_kind"] == "posix"
        said = served.process.log_text
        for part in (served.url, str(tmp_path / "data" / "catalog.db"), str(tmp_path / "data" / "token")):
            assert part in said
        assert token not in said
        again = run_holdfast(
            "serve", HOLDFAST_DATA_DIR=str(tmp_path / "other"), HOLDFAST_PORT=served.url.rpartition(":")[2]
        )
        assert again.returncode == 1
        assert "HOLDFAST_PORT" in again.stderr
        assert len(again.stderr.splitlines()) == 1
        assert not (tmp_path / "other").exists(), "a start that fails must not touch anything"


def test_a_request_in_flight_is_answered_before_it_ends(tmp_path: Path) -> None:
    with holdfast_serve(tmp_path, forked=False) as served:
        token = (tmp_path / "data" / "token").read_text().strip()
        with request_without_its_body(served.url, token) as (connection, body):
            os.kill(served.process.pid, signal.SIGTERM)
            while "Shutting down" not in served.process.log_text:
                time.sleep(0.01)
            connection.sendall(body)
            assert b"201 Created" in connection.recv(4096)
        served.process.stop()
        assert "Finished server process" in served.process.log_text


@pytest.mark.rule("limits-before-work")
def test_more_connections_at_once_than_it_has_files_leave_it_its_database(tmp_path: Path) -> None:
    few, many, port = 1024, 1500, free_ports()
    url, settings = f"http://127.0.0.1:{port}", {"HOLDFAST_PORT": str(port), "HOLDFAST_HEADER_SECONDS": "600"}
    settings["HOLDFAST_DATA_DIR"] = str(tmp_path / "data")
    with ExitStack() as stack:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limits[1] != resource.RLIM_INFINITY and limits[1] < 2 * many:
            pytest.skip(f"this test needs {2 * many} open files, and may have {limits[1]}")
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2 * many), limits[1]))
        process = ServerProcess(
            ["sh", "-c", f'ulimit -n {few} && exec "{HOLDFAST}" serve'],
            log=tmp_path / "service.log",
            ready=lambda: is_ready(url),
            env=without_holdfast_settings() | settings,
        )
        stack.callback(process.stop)
        assert "fewer_connections" in process.log_text
        process.signal(signal.SIGSTOP)
        for _ in range(many):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", port))
        process.signal(signal.SIGCONT)
        until = time.monotonic() + 120
        while not is_ready(url):  # its own connection may be one too many, too
            assert time.monotonic() < until
        assert "out of system resource" not in process.log_text


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"HOLDFAST_PROT": "1"}, "HOLDFAST_PROT"),
        ({"HOLDFAST_PORT": "abc"}, "HOLDFAST_PORT"),
        ({"HOLDFAST_STORE": "ftp://x"}, "HOLDFAST_STORE"),
        ({"HOLDFAST_DATABASE_URL": "sqlite:////proc/nowhere/catalog.db"}, "database"),
        ({"HOLDFAST_BOOTSTRAP_TOKEN": "secret"}, "HOLDFAST_BOOTSTRAP_TOKEN"),
    ],
)
def test_a_wrong_setting_stops_the_start_with_one_line(tmp_path: Path, settings: dict[str, str], named: str) -> None:
    port = {"HOLDFAST_PORT": str(free_ports())}
    done = run_holdfast("serve", **{"HOLDFAST_DATA_DIR": str(tmp_path / "data"), **port, **settings})
    assert done.returncode in (2, 5), done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("holdfast: ")
    assert named in last
    assert "Traceback" not in done.stderr


def test_the_first_token_for_others_is_made_on_the_database(tmp_path: Path) -> None:
    data = {"HOLDFAST_DATA_DIR": str(tmp_path / "data")}
    made = run_holdfast("admin", "create-token", "--name", "ops", "--scope", "read", "--project", "demo", **data)
    assert made.returncode == 0, made.stderr
    with holdfast_serve(tmp_path, forked=False) as served:
        info = httpx.get(
            f"{served.url}/v1/service", timeout=60, headers={"Authorization": f"Bearer {made.stdout.strip()}"}
        ).json()
    assert (info["token_name"], info["token_project"], info["token_scopes"]) == ("ops", "demo", ["read"])
    raised = run_holdfast("admin", "raise-epoch", **data)
    assert "epoch 2" in raised.stdout
    assert run_holdfast("admin", "confirm-move", **data).returncode == 0


@pytest.mark.parametrize("project", ["", "a/b", "x~1"])
def test_a_token_for_a_project_without_a_name_is_not_made_for_all_of_them(tmp_path: Path, project: str) -> None:
    """As `--project "$PROJECT"` says where the variable is not set."""
    made = run_holdfast("admin", "create-token", "--project", project, HOLDFAST_DATA_DIR=str(tmp_path / "data"))
    assert (made.returncode, made.stdout) == (2, "")
    assert "no project's name" in made.stderr


def test_the_settings_are_shown_as_a_table() -> None:
    shown = run_holdfast("serve", "--print-settings", COLUMNS="80")
    assert shown.returncode == 0
    assert "HOLDFAST_DATABASE_URL" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert os.environ.get("HOLDFAST_DATABASE_URL") is None

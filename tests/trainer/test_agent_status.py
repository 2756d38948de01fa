"""What an operator sees of a node's agent: `holdfast agent status`, and its metrics."""

from __future__ import annotations

import json
import signal
import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.node_agent import agent_serve
from tests.support.ports import free_ports
from tests.support.ranks import launched, read_until
from tests.support.serve import run_holdfast
from typer.testing import CliRunner

from holdfast_client.agent import connection
from holdfast_client.agent.link import status_of
from holdfast_client.cli.main import app
from holdfast_client.errors import ConfigurationError, ServiceUnavailable

RANK = "tests.support.handing_rank"
MIB = 1024**2


def series(address):
    with urllib.request.urlopen(f"http://{address}/metrics") as reply:
        text = reply.read().decode()
    families = text_string_to_metric_families(text)
    return {
        (sample.name, sample.labels.get("rank", "")): sample.value for family in families for sample in family.samples
    }


def told_by_the_command(*options):
    """Within this process, whose patience is the command's too."""
    told = CliRunner().invoke(app, ["agent", "status", *options])
    assert told.exit_code == 0, told.output
    return told.stdout


def states(status):
    return [(part.state, part.rank_lives) for part in status.held]


def wait_for(socket, holds):
    until = time.monotonic() + 90
    while not holds(status := status_of(socket)):
        assert time.monotonic() < until, status
        time.sleep(0.02)
    return status


def test_an_operator_sees_what_the_agent_holds_of_whom_and_what_became_of_it(run, service, tmp_path, monkeypatch):
    address = f"127.0.0.1:{free_ports()}"
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 90)  # a crowded machine answers late
    with agent_serve(tmp_path / "log", "--memory", "64MiB", "--metrics", address) as agent:
        monkeypatch.setenv("HOLDFAST_AGENT", str(agent.socket))
        with launched(RANK, run, 1, "told", MIB) as [rank]:
            read_until(rank, "restored 0")
            service.served.process.signal(signal.SIGSTOP)  # nothing can be committed meanwhile
            try:
                rank.stdin.write("go on\n")
                rank.stdin.flush()
                read_until(rank, "saved 0")
                [part] = wait_for(agent.socket, lambda status: states(status) == [("uploading", True)]).held
                assert (f"{part.project}/{part.run}", part.step, part.rank, part.tries) == (run, 0, 0, 1)
                assert part.bytes >= MIB
                assert series(address)["holdfast_agent_held_parts", "alive"] == 1
                rank.kill()
                rank.wait(timeout=90)
                wait_for(agent.socket, lambda status: states(status) == [("uploading", False)])
                told = told_by_the_command("--socket", str(agent.socket))
                assert {run, "uploading", "dead"} <= set(told.split())
            finally:
                service.served.process.signal(signal.SIGCONT)
        wait_for(agent.socket, lambda status: not status.held)
        told = json.loads(told_by_the_command("--socket", str(agent.socket), "--json"))
        assert (told["memory_limit_bytes"], told["held"], told["counts"]["taken"]) == (64 * MIB, [], 1)
        assert (told["counts"]["finished"], told["counts"]["given_up"]) == (1, 0)
        [kept] = told["kept"]
        assert (f"{kept['project']}/{kept['run']}", kept["step"], kept["parts"], kept["host_ranks"]) == (run, 0, 1, 1)
        assert "1 of 1" in told_by_the_command("--socket", str(agent.socket))
        found = series(address)
        assert found["holdfast_agent_finished_parts_total", ""] == 1
        assert found["holdfast_agent_memory_limit_bytes", ""] == 64 * MIB
        assert found["holdfast_agent_kept_bytes", ""] == kept["bytes"] >= MIB


def test_no_agent_and_one_that_is_stopped_are_told_apart(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match="No agent serves"):
        status_of(tmp_path / "agent.sock")
    with agent_serve(tmp_path / "log") as agent:
        agent.process.signal(signal.SIGSTOP)
        monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.1)
        with pytest.raises(ServiceUnavailable, match="does not answer"):
            status_of(agent.socket)


def test_an_address_that_cannot_be_served_is_refused_with_an_example(tmp_path_factory):
    socket = tmp_path_factory.mktemp("a") / "agent.sock"
    for address in ("9464", "127.0.0.1:port", "127.0.0.1:99999"):
        told = run_holdfast("agent", "serve", "--socket", str(socket), "--metrics", address)
        assert told.returncode == 2
        assert "such as 127.0.0.1:9464" in told.stderr.replace("\n", " ")

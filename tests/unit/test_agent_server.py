"""One agent serves at a socket, whatever has become of its files."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from holdfast_client.agent.copies import Copies
from holdfast_client.agent.link import status_of
from holdfast_client.agent.process import LaunchedAgent, serves_at
from holdfast_client.agent.server import Agent
from holdfast_client.errors import ConfigurationError

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="agents need Linux")


@contextmanager
def serving():
    """The path of its socket."""
    with tempfile.TemporaryDirectory(prefix="holdfast-agent-") as folder:
        path = Path(folder) / "agent.sock"
        agent = Agent(path, 2**20, keeps=1)
        thread = threading.Thread(target=agent.serve, kwargs={"grace_seconds": 0})
        thread.start()
        try:
            yield path
        finally:
            agent.end()
            thread.join(60)


def test_while_another_launchs_agent_serves_that_of_this_one_stands_by(tmp_path_factory):
    path = tmp_path_factory.mktemp("a") / "agent.sock"
    first = LaunchedAgent(path, 30)
    second, third = LaunchedAgent(path, 30), LaunchedAgent(path, 30)
    serving = status_of(path)
    assert (serving.pid, serving.of_launch) == (first._process.pid, True)
    assert third.end(60) == 0, "it has never served"
    assert first.end(60) == 0
    until = time.monotonic() + 60
    while not serves_at(path):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert status_of(path).pid == second._process.pid
    assert second.end(60) == 0


def test_a_second_agent_takes_no_socket_away_also_if_a_cleaner_has_removed_the_locks_file():
    with serving() as path:
        os.unlink(f"{path}.lock")
        with pytest.raises(ConfigurationError, match="Another agent serves"):
            Agent(path, 2**20, keeps=1)
        assert serves_at(path)


def test_an_agent_that_is_started_anew_is_found_where_the_one_before_was_unless_its_port_is_taken(tmp_path_factory):
    path = tmp_path_factory.mktemp("a") / "agent.sock"
    copies = partial(Copies, count=1, host="127.0.0.1")

    def address():
        agent = Agent(path, 2**20, keeps=1, copies=copies)
        agent.end()
        agent.serve(grace_seconds=0)
        return agent.copies.address

    first = address()
    assert address() == first
    with socket.create_server((first.host, first.port)):
        another = address()
        assert another.port != first.port
        assert another.token != first.token
    assert address() == another


def test_the_next_agent_does_not_wait_until_other_hosts_have_left_this_one(tmp_path_factory):
    path, left = tmp_path_factory.mktemp("a") / "agent.sock", threading.Event()

    class Leaving(Copies):
        def close(self):
            super().close()
            left.wait(60)

    agent = Agent(path, 2**20, keeps=1, copies=partial(Leaving, count=1, host="127.0.0.1"))
    agent.end()
    thread = threading.Thread(target=agent.serve, kwargs={"grace_seconds": 0})
    thread.start()
    until = time.monotonic() + 60
    while serves_at(path):
        assert time.monotonic() < until
        time.sleep(0.005)
    following = Agent(path, 2**20, keeps=1, wait_seconds=60)
    assert thread.is_alive()
    left.set()
    following.end()
    following.serve(grace_seconds=0)
    thread.join(60)

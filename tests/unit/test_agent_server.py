"""One agent serves at a socket, whatever has become of its files."""

from __future__ import annotations

import os
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast_client.agent.process import serves_at
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


def test_a_second_agent_takes_no_socket_away_also_if_a_cleaner_has_removed_the_locks_file():
    with serving() as path:
        os.unlink(f"{path}.lock")
        with pytest.raises(ConfigurationError, match="Another agent serves"):
            Agent(path, 2**20, keeps=1)
        assert serves_at(path)

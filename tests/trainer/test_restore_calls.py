"""What a restore asks the service for, call by call (docs/adr/0055): all ranks of a job that comes back ask at once."""

from __future__ import annotations

from unittest.mock import patch

import torch
from gloo import run_ranks
from tests.support.fault_proxy.calls import calls_of

import holdfast
from holdfast_client.transport import Transport

SHARED = ["other", "read_tickets", "read_tickets", "release"]
"""`other` is the proof of the mount. The first tickets bring the rank's chunk list along."""
FIRST = ["newest_attempt", "open", "manifest", *SHARED, "resumed_from"]


def calls_of_a_restore(rank: int, run: str) -> tuple[int, list[str]]:
    state = {"model": torch.nn.Linear(8, 8), "mine": {"rank": rank}}
    asked: list[str] = []
    send = Transport._send

    def noted(self, call):
        asked.extend(sorted(calls_of(call.method, call.route, None)))
        return send(self, call)

    with holdfast.Checkpointer(run, create=True) as ckpt:
        with patch.object(Transport, "_send", noted):
            start = ckpt.restore(state)
        if start == 0:
            ckpt.save(0, state).committed.result(timeout=60)
    assert state["mine"]["rank"] == rank
    return start, [each for each in asked if each != "heartbeat"]


def test_one_restore_makes_eight_calls_and_each_further_rank_four(run):
    assert calls_of_a_restore(0, run) == (0, ["newest_attempt", "open"])
    assert calls_of_a_restore(0, run) == (1, FIRST)
    two = f"{run}-two"
    run_ranks(calls_of_a_restore, 2, two)
    assert run_ranks(calls_of_a_restore, 2, two) == [(1, FIRST), (1, SHARED)]

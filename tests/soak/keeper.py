"""The operator of a soak: puts policies, prunes, takes back, pins, collects, sweeps and scrubs, again and again, until
told to stop. What is refused for a good reason is counted; anything else is a fault."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from typing import Any

from holdfast_client.client import Client
from holdfast_client.errors import Conflict, HoldfastError, NotFound, ServiceUnavailable
from holdfast_protocol.policies.policy import PolicyKind
from holdfast_protocol.pruning import PruneCheckpoints
from holdfast_protocol.states import CheckpointState
from holdfast_protocol.stores import StartSweep
from tests.soak.ledger import Ledger

_PAUSE_SECONDS = 0.5
# By how often: what changes most is done most.
_WEIGHTS = {"prune": 6, "undelete": 5, "pin": 2, "unpin": 2, "collect": 3, "sweep": 2, "scrub": 2, "look": 3}


class Keeper:
    def __init__(self, client: Client, project: str, ledger: Ledger, seed: int) -> None:
        self._client = client
        self._project = project
        self._ledger = ledger
        self._numbers = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="keeper", daemon=True)
        self._acts: dict[str, Callable[[], object]] = {
            "prune": self._prune,
            "undelete": self._undelete,
            "pin": self._pin,
            "unpin": self._unpin,
            "collect": lambda: client.collections.start(),
            "sweep": lambda: client.sweeps.start(StartSweep(dry_run=self._numbers.random() < 0.3)),
            "scrub": self._scrub,
            "look": lambda: client.collections.plan(project),
        }

    def start(self, policies: Mapping[PolicyKind, dict[str, Any]]) -> None:
        """These are put for the whole project first."""
        for kind, document in policies.items():
            self._client.policies.put(kind, self._project, None, document)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(90)

    def _work(self) -> None:
        while not self._stop.wait(_PAUSE_SECONDS * self._numbers.random()):
            (what,) = self._numbers.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
            try:
                self._acts[what]()
                self._ledger.count(f"operator: {what}")
            except (Conflict, NotFound) as refusal:
                self._ledger.count(f"operator: {what} refused ({type(refusal).__name__})")
            except ServiceUnavailable as error:
                self._ledger.count(f"operator: {what} deferred ({type(error).__name__})")
            except HoldfastError as error:
                self._ledger.fault(f"the operator's {what} failed with {type(error).__name__}: {error}")

    def _run(self) -> str | None:
        runs = [run.name for run in self._client.runs.all(self._project)]
        return self._numbers.choice(runs) if runs else None

    def _one(self, state: CheckpointState) -> tuple[str, str] | None:
        run = self._run()
        if run is None:
            return None
        found = self._client.checkpoints.list(self._project, run, state=state, limit=30).items
        return (run, self._numbers.choice(found).id) if found else None

    def _prune(self) -> None:
        if (one := self._one(CheckpointState.COMMITTED)) is not None:
            self._client.retention.prune(
                self._project, one[0], PruneCheckpoints(checkpoint_ids=[one[1]], reason="the soak")
            )

    def _undelete(self) -> None:
        if (one := self._one(CheckpointState.TRASHED)) is not None:
            self._client.checkpoints.undelete(one[1], pin=False)

    def _pin(self) -> None:
        if (one := self._one(CheckpointState.COMMITTED)) is not None:
            self._client.checkpoints.pin(one[1], "the soak", expires_in_seconds=self._numbers.randint(2, 20), etag="*")

    def _unpin(self) -> None:
        if (one := self._one(CheckpointState.COMMITTED)) is not None:
            self._client.checkpoints.unpin(one[1], "*")

    def _scrub(self) -> None:
        if (run := self._run()) is not None:
            self._client.scrubs.run(self._project, run)

"""People at work beside the jobs (tests/soak/keeper.py), who write down what they ask for: what they delete may be
gone, and what they were told is back may not."""

from __future__ import annotations

from holdfast_protocol.pruning import PruneCheckpoints
from holdfast_protocol.states import CheckpointState
from tests.jepsen.journal import Journal
from tests.soak.keeper import Keeper


class ModelKeeper(Keeper):
    _ledger: Journal

    def _prune(self) -> None:
        if (one := self._one(CheckpointState.COMMITTED)) is not None:
            self._ledger.asked(one[1])
            self._client.retention.prune(
                self._project, one[0], PruneCheckpoints(checkpoint_ids=[one[1]], reason="the trial")
            )

    def _undelete(self) -> None:
        if (one := self._one(CheckpointState.TRASHED)) is not None:
            self._client.checkpoints.undelete(one[1], pin=False)
            self._ledger.back(one[1])

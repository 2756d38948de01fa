"""What a person does with the spool of one machine when no job does it: push its saves, each as far as it is here.

The pusher is the run's newest attempt, whoever that is: the service keeps what it pushes on the line of descent only
while that attempt has not begun to save.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.errors import HoldfastError, NotFound, OffLineBranch, ServiceUnavailable, TokenProblem
from holdfast_client.local.push import belongs_here, push_late
from holdfast_client.local.saves import SaveKey, SpooledSave
from holdfast_client.local.tier import LocalTier
from holdfast_protocol.attempts import AttemptView
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.counted import counted
from holdfast_protocol.fencing import Fence
from holdfast_protocol.states import CheckpointState


@dataclass(frozen=True)
class Outcome:
    """Of one save, in a few words."""

    committed: bool
    told: str


class SavePusher:
    def __init__(self, client: Client, tier: LocalTier, *, allow_off_line: bool) -> None:
        self._client = client
        self._tier = tier
        self._allow_off_line = allow_off_line
        self._epoch = client.server_info().epoch

    def push(self, save: SpooledSave) -> Outcome:
        """Raises ServiceUnavailable and TokenProblem, which would meet the next save too; all else is the outcome."""
        try:
            if not belongs_here(self._client, save.key):
                return Outcome(False, "left: this service does not know the attempt that saved it")
            views = self._push_shards(save)
        except OffLineBranch as error:
            return Outcome(False, f"left: {error} `holdfast spool push --off-line` does so.")
        except (ServiceUnavailable, TokenProblem):
            raise
        except HoldfastError as error:
            return Outcome(False, f"left: {error}")
        return self._outcome(save, views[-1])

    def _push_shards(self, save: SpooledSave) -> list[CheckpointView]:
        newest = self._newest_attempt(save.key)
        fence = Fence(epoch=self._epoch, attempt=newest.number, launch_id=newest.launch_id)
        with TransferWorkers() as workers:
            return [
                push_late(
                    self._client,
                    self._tier.folder,
                    record,
                    fence,
                    workers=workers,
                    allow_off_line=self._allow_off_line,
                )
                for record in save.records
            ]

    def _newest_attempt(self, key: SaveKey) -> AttemptView:
        newest_first = self._client.attempts(key.project, key.run, limit=1).items
        if not newest_first:
            raise NotFound(f"{key.run_name} has no attempts")
        return newest_first[0]

    def _outcome(self, save: SpooledSave, view: CheckpointView) -> Outcome:
        if view.state is not CheckpointState.COMMITTED:
            missing = ", ".join(map(str, view.missing_ranks))
            return Outcome(
                False,
                f"sealed {view.sealed_ranks} of {counted(view.world_size, 'rank')}; push those of rank {missing} too, "
                "where they "
                "are, and this once more",
            )
        for record in save.records:
            self._tier.spool.forget(record.name)
        return Outcome(True, "committed, off the line" if view.off_line else "committed")

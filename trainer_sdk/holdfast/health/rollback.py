"""Back to the last healthy checkpoint, in a running job: `ckpt.rollback(state)`. Collective.

    all ranks name the same target -> saves in flight end, or are given up -> is there such a checkpoint? -> a new
    attempt of this same job, which fences its own old one -> restore -> the lineage goes on from there

A new attempt, because an attempt's first commit cuts its lineage: its saves since then would stay the run's latest
(rule latest-follows-lineage). If the process dies before the restore is recorded, the next launch resumes as if there
had been no rollback.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from holdfast.errors import ConfigurationError, HoldfastError, RanksDisagree
from holdfast.restore.restorer import Restorer
from holdfast.save.pipeline import SavePipeline
from holdfast.session.session import Session

log = logging.getLogger("holdfast")

_FINISH_SECONDS = 30.0
"""A save in flight may be worth this wait, unless the rollback leaves it behind; it is worth no more."""
_GIVE_UP_SECONDS = 30.0


class Rollback:
    """One job's; `back` is called on the training thread of every rank."""

    def __init__(self, session: Session, pipeline: SavePipeline, restorer: Restorer) -> None:
        self._session = session
        self._ranks = session.ranks
        self._pipeline = pipeline
        self._restorer = restorer

    def back(
        self, state: dict[str, Any], *, steps: int | None, before: int | None, keep: frozenset[str], skip_data: bool
    ) -> int:
        """The next step to run. Without such a checkpoint it raises NoRestorePoint before there is a new attempt or
        another state; saves in flight have ended by then."""
        before_step, kept = self._agree(state, steps=steps, before=before, keep=keep, skip_data=skip_data)
        self._finish_saves()
        at = self._session.progress.step
        self._restorer.choose_before(before_step)
        self._session.open_anew()
        start = self._restorer.go_back(state, before_step, kept)
        if self._ranks.is_first:
            left = f"; {', '.join(sorted(kept))} stayed as it was" if kept else ""
            log.warning(
                "%s went back from step %s to step %d, as attempt %d%s",
                self._session.run,
                at,
                start - 1,
                self._session.opened.attempt,
                left,
            )
        return start

    def _before_step(self, steps: int | None, before: int | None) -> int | None:
        if steps is None:
            return before
        if before is not None or steps < 1:
            raise ConfigurationError(
                f"rollback(steps={steps}, before={before}) names no way back. Give steps, at least 1, or before, or "
                "neither for the newest healthy checkpoint."
            )
        at = self._session.progress.step
        if at is None:
            raise ConfigurationError("rollback(steps=…) counts from the last step, and none was run yet. Give before=…")
        return max(0, at - steps + 1)

    def _agree(
        self, state: Mapping[str, Any], *, steps: int | None, before: int | None, keep: frozenset[str], skip_data: bool
    ) -> tuple[int | None, frozenset[str]]:
        """The step to go below, and the components that stay as they are: on all ranks alike, or all raise before
        anything is done. The arguments must be the same; the components of a rank need not be."""

        def asked() -> tuple[tuple[int | None, list[str], bool], frozenset[str]]:
            if not self._session.has_opened:
                raise ConfigurationError("rollback() comes too early: this job has neither restored nor saved yet.")
            return (self._before_step(steps, before), sorted(keep), skip_data), frozenset(state)

        told = self._ranks.together(asked)
        (before_step, _, _), _ = told[0]
        if any(each != told[0][0] for each, _ in told):
            raise RanksDisagree(f"One rank goes back before step {before_step}, and another one elsewhere")
        # Of any rank: loaders that only some ranks hold, or name otherwise, stay where they are as well.
        keys = frozenset[str]().union(*(each for _, each in told))
        if unknown := sorted(keep - keys):
            raise ConfigurationError(f"keep={unknown!r} is not in the state; its keys are {sorted(keys)}.")
        return before_step, keep | (_data_of(keys) if skip_data else frozenset())

    def _finish_saves(self) -> None:
        if all(self._ranks.gather(self._pipeline.wait_idle(_FINISH_SECONDS))):
            return
        self._pipeline.supersede("The job goes back to an older checkpoint")
        if not all(self._ranks.gather(self._pipeline.wait_idle(_GIVE_UP_SECONDS))):
            raise HoldfastError(
                "A save in flight neither ends nor can be given up, so the job cannot go back. Launch it again.",
                code="save_in_flight",
            )


def _data_of(keys: frozenset[str]) -> frozenset[str]:
    found = frozenset(key for key in keys if "loader" in key.lower() or "sampler" in key.lower())
    if not found:
        raise ConfigurationError(
            f"skip_data=True finds no data loader in the state, whose keys are {sorted(keys)}. Name what shall "
            "stay as it is: keep=[…]."
        )
    return found

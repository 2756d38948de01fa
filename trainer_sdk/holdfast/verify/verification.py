"""The plan of a verification: straight, killed, resumed; compare; if they differ, once more straight. No torch here.

cli -> **verification** -> launching (each launch), evidence, diagnosis -> report
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from holdfast.verify.diagnosis import Cause, diagnose
from holdfast.verify.evidence import Comparison, compare, follows_on, saw_training, unrepeated
from holdfast.verify.launching import Launched, LaunchFailed, launch
from holdfast.verify.orders import LaunchOrder
from holdfast.verify.records import Trail
from holdfast_protocol.text import counted


class Verdict(StrEnum):
    EXACT = "exact"
    NOT_EXACT = "not exact"
    NOT_DETERMINISTIC = "not deterministic"
    NOTHING_SEEN = "nothing seen"
    """No tensor and no metric was compared, so no error would have been noticed."""


@dataclass(frozen=True)
class Verification:
    """`saved_step` is the last step before the SIGKILL."""

    verdict: Verdict
    comparison: Comparison
    saved_step: int
    ranks: int
    metrics: list[str]
    """Names of the metrics that step() got; without any only the state is compared."""
    tensors: int
    causes: list[Cause] = field(default_factory=list)


class Verifier:
    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        *,
        timeout_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        """`environment` leads the script to a service; its runs there get names of their own."""
        self._command = command
        self._folder = folder
        self._environment = environment
        self._timeout_seconds = timeout_seconds
        self._say = say
        self._id = f"verify-{uuid.uuid4().hex[:8]}"

    def verify(self, steps: int, kill_after: int) -> Verification:
        """`steps` boundaries straight; then killed after `kill_after` of them, and resumed. Raises LaunchFailed."""
        straight = self._straight("straight", f"{counted(steps, 'step')} straight", steps)
        done = straight.trails[0].steps
        if len(done) <= kill_after:
            raise LaunchFailed(
                f"The script ended by itself after {counted(len(done), 'step')}. Let it run longer, or kill it "
                "earlier: "
                f"--kill-at {max(len(done) - 1, 1)}."
            )
        saved_step, last_step = done[kill_after - 1], done[-1]
        text = f"the same command, killed with SIGKILL once step {saved_step} is committed"
        killed = self._launch("killed", text, self._order("resumed", stop_after=kill_after, save_at_stop=True))
        if not killed.parked:
            raise LaunchFailed(
                "The script ended by itself before the step at which it was to be killed. Launch it again."
            )
        ignored = unrepeated(straight.trails, killed.trails)
        if ignored is None:
            return self._not_deterministic(straight.trails, killed.trails, saved_step)
        order = self._order("resumed", stop_at_step=last_step)
        resumed = self._launch("resumed", "the same command, resumed", order)
        comparison = compare(straight.trails, resumed.trails, ignored=ignored)
        if comparison.equal and follows_on(straight.trails, resumed.trails, saved_step):
            return self._equal(straight.trails, comparison, saved_step)
        again = self._straight("again", "they differ: once more straight, to see whether it repeats itself", steps)
        repeated = unrepeated(straight.trails, again.trails)
        if repeated is None:
            return self._not_deterministic(straight.trails, again.trails, saved_step)
        comparison = compare(straight.trails, resumed.trails, ignored=ignored | repeated)
        if comparison.equal and follows_on(straight.trails, resumed.trails, saved_step):
            return self._equal(straight.trails, comparison, saved_step)
        rank = comparison.first[0].rank if comparison.first else 0
        causes = diagnose(straight.trails[rank], resumed.trails[rank], comparison, saved_step)
        return self._result(Verdict.NOT_EXACT, straight.trails, comparison, saved_step, causes)

    def _straight(self, name: str, text: str, steps: int) -> Launched:
        return self._launch(name, text, self._order(name, stop_after=steps))

    def _order(
        self, run: str, *, stop_after: int | None = None, stop_at_step: int | None = None, save_at_stop: bool = False
    ) -> LaunchOrder:
        return LaunchOrder(f"{self._id}-{run}", os.getpid(), stop_after, stop_at_step, save_at_stop)

    def _launch(self, name: str, text: str, order: LaunchOrder) -> Launched:
        self._say(text)
        return launch(
            self._command,
            order,
            self._folder / name,
            environment=self._environment,
            timeout_seconds=self._timeout_seconds,
        )

    def _not_deterministic(self, straight: list[Trail], again: list[Trail], saved_step: int) -> Verification:
        return self._result(Verdict.NOT_DETERMINISTIC, straight, compare(straight, again), saved_step)

    def _equal(self, straight: list[Trail], comparison: Comparison, saved_step: int) -> Verification:
        verdict = Verdict.EXACT if saw_training(straight, comparison) else Verdict.NOTHING_SEEN
        return self._result(verdict, straight, comparison, saved_step)

    def _result(
        self,
        verdict: Verdict,
        straight: list[Trail],
        comparison: Comparison,
        saved_step: int,
        causes: list[Cause] | None = None,
    ) -> Verification:
        last = straight[0].boundaries[-1]
        return Verification(
            verdict,
            comparison,
            saved_step,
            len(straight),
            sorted(last.metrics),
            len(last.now.tensors),
            causes or [],
        )

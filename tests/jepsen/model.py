"""What must still be there, by the journal alone: every commit that a job was told of, what people asked to be deleted,
and what the database cannot know any more. Pure but for reading the journal."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast_protocol.states import CheckpointState
from tests.jepsen.journal import Wrong
from tests.soak.ledger import Ledger


@dataclass(frozen=True)
class Commit:
    checkpoint_id: str
    run: str
    launch: str
    attempt: int
    step: int
    at: float
    begun_at: float
    after_fence: bool

    def __str__(self) -> str:
        return f"{self.run} step {self.step} of attempt {self.attempt} ({self.checkpoint_id})"


@dataclass(frozen=True)
class Failover:
    """What was committed between `knows_until` and `at` is not in the database; `recorded`: it is beside the data."""

    knows_until: float
    at: float
    recorded: frozenset[str]


@dataclass(frozen=True)
class Kept:
    """A checkpoint as it was found at the end. `problem`: why it could not be read, or is marked."""

    state: CheckpointState
    problem: str | None = None


@dataclass
class Verdict:
    """`findings`: every one is a reason why the trial has failed. `facts` are for the table."""

    findings: list[tuple[Wrong, str]] = field(default_factory=list)
    facts: dict[str, int] = field(default_factory=dict)

    def found(self, wrong: Wrong, what: str) -> None:
        self.findings.append((wrong, what))

    def count(self, what: str, times: int = 1) -> None:
        self.facts[what] = self.facts.get(what, 0) + times

    def number(self, wrong: Wrong) -> int:
        return sum(each is wrong for each, _ in self.findings)


class Model:
    """`keep_last`: how many a run's retention policy keeps, by run; a run without one keeps all."""

    def __init__(self, ledger: Ledger, keep_last: Mapping[str, int]) -> None:
        self._keep_last = keep_last
        self.commits: dict[str, Commit] = {}
        for line in ledger.lines("committed"):
            commit = Commit(checkpoint_id=line["checkpoint"], **{name: line[name] for name in _COPIED})
            known = self.commits.get(commit.checkpoint_id)
            if known is None or commit.at < known.at:
                self.commits[commit.checkpoint_id] = commit
        self.failovers = [
            Failover(line["knows_until"], line["at"], frozenset(line["recorded"])) for line in ledger.lines("failed")
        ]
        self._told = [line["at"] for line in ledger.lines("told")]
        self._asked = _latest(ledger, "asked")
        self._back = _latest(ledger, "back", unless=self._is_forgotten)
        self._opened = list(ledger.lines("opened"))
        self._found = [(Wrong(line["wrong"]), line["what"]) for line in ledger.lines("found")]

    def judge(self, kept: Mapping[str, Kept]) -> Verdict:
        """`kept`: every checkpoint that the catalog has at the end, whatever its state."""
        verdict = Verdict(findings=list(self._found))
        for commit in self.commits.values():
            self._judge_commit(commit, kept.get(commit.checkpoint_id), verdict)
            if commit.after_fence:
                verdict.found(Wrong.MIXED, f"{commit} was committed by a launch that had been told that it is fenced")
        for checkpoint_id, one in kept.items():
            if checkpoint_id not in self.commits and one.state is CheckpointState.COMMITTED and one.problem:
                verdict.found(Wrong.LOST, f"{checkpoint_id}, whose job was never told, cannot be read: {one.problem}")
        self._judge_restore_points(verdict)
        return verdict

    def _judge_commit(self, commit: Commit, one: Kept | None, verdict: Verdict) -> None:
        state = None if one is None else one.state
        if one is not None and state is CheckpointState.COMMITTED:
            if one.problem is not None:
                verdict.found(Wrong.LOST, f"{commit} cannot be restored: {one.problem}")
            else:
                verdict.count("commits told, and restored at the end")
        elif self._may_be_gone(commit):
            verdict.count("commits told, and gone by request or policy")
        elif state is None and self._said_so_first(commit):
            verdict.count("commits lost with a failover before they were recorded; the service said so first")
        else:
            verdict.found(Wrong.LOST, f"{commit} is {state or 'not in the catalog'}")

    def _may_be_gone(self, commit: Commit) -> bool:
        asked_at = self._asked.get(commit.checkpoint_id)
        if asked_at is not None and self._back.get(commit.checkpoint_id, float("-inf")) < asked_at:
            return True
        keep = self._keep_last.get(commit.run)
        newer = sum(other.run == commit.run and other.step > commit.step for other in self.commits.values())
        return keep is not None and newer >= keep

    def _said_so_first(self, commit: Commit) -> bool:
        return any(
            each.knows_until <= commit.at
            and commit.begun_at <= each.at
            and commit.checkpoint_id not in each.recorded
            and any(told >= each.at for told in self._told)
            for each in self.failovers
        )

    def _is_forgotten(self, at: float) -> bool:
        """A database does not know what it was told at that moment."""
        return any(each.knows_until <= at <= each.at for each in self.failovers)

    def _judge_restore_points(self, verdict: Verdict) -> None:
        """A launch goes on from the newest commit that was told before it asked, or hears why it cannot."""
        for opened in self._opened:
            before = [
                each
                for each in self.commits.values()
                if each.run == opened["run"] and each.at < opened["at"] and not self._may_be_gone(each)
            ]
            newest = max(before, key=lambda each: each.step, default=None)
            offered = -1 if opened["step"] is None else opened["step"]
            if newest is None or newest.step <= offered or newest.checkpoint_id in opened["skipped"]:
                continue
            if self._said_so_first(newest):
                continue
            what = f"launch {opened['launch']} (attempt {opened['attempt']}) was offered step {offered}"
            verdict.found(Wrong.LOST, f"{what}, and not a word of {newest}")

    def launches_with_one_fence(self) -> Collection[str]:
        """Two launches that were given the same number: not wrong by itself, and how shards get mixed."""
        first: dict[tuple[str, int, int], str] = {}
        doubles = []
        for opened in self._opened:
            fence = (opened["run"], opened["epoch"], opened["attempt"])
            if first.setdefault(fence, opened["launch"]) != opened["launch"]:
                doubles.append(f"{fence[0]}: two launches were given attempt {fence[2]} of epoch {fence[1]}")
        return doubles


_COPIED = ("run", "launch", "attempt", "step", "at", "begun_at", "after_fence")


def _latest(ledger: Ledger, kind: str, unless: Any = lambda at: False) -> dict[str, float]:
    """By checkpoint, when this was last written of it."""
    latest: dict[str, float] = {}
    for line in ledger.lines(kind):
        if not unless(line["at"]):
            latest[line["checkpoint"]] = max(line["at"], latest.get(line["checkpoint"], line["at"]))
    return latest

"""A run of 30 days, a checkpoint an hour, under the tiered policy: exactly what a table says, with reasons and bytes.

The table was made by looking at a calendar, and not by calling the code. Checkpoint i is committed i hours after
Thursday 2026-03-05 00:15 UTC; the last one, 719, is of Friday 2026-04-03 23:15.

    everything newer than 6 hours before 719     18:15 to 23:15 of that day: 714 to 719
    the newest of each day newer than 7 days     the 23:15 of Apr 3 back to Mar 28. That of Mar 27 is exactly 7 days old
    the newest of each week newer than 3 months  Sundays 23:15 (Mar 8, 15, 22, 29) and 719. The weeks are ISO's
    milestones                                   99 and 499
"""

from __future__ import annotations

import itertools
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import insert
from sqlalchemy.orm import Session

from holdfast_protocol.policies.retention import PRESETS
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import (
    Attempt,
    Checkpoint,
    Chunk,
    ChunkList,
    ChunkListEntry,
    Copy,
    Project,
    ReadLease,
    Run,
    Shard,
    Store,
    Table,
)
from holdfast_service.db.tables.operations import Hold
from tests.support.rank import answer
from tests.support.service import RunningService

COUNT = 720
FIRST = datetime(2026, 3, 5, 0, 15, tzinfo=UTC)

# By checkpoint: the reasons for which it stays. Everything else expires, with the one reason that no rule keeps it.
WITHIN_6H = "keep_within: newer than 6h before the newest"
EXPECTED: dict[int, list[str]] = {
    719: [
        WITHIN_6H,
        "keep_within_daily: the newest of 2026-04-03",
        "keep_within_weekly: the newest of week 2026-W14",
        "restore_point: the restore point",
        "newest_healthy: one of the two newest healthy points",
    ],
    718: [WITHIN_6H, "newest_healthy: one of the two newest healthy points"],
    717: [WITHIN_6H],
    716: [WITHIN_6H],
    715: [WITHIN_6H],
    714: [WITHIN_6H],
    695: ["keep_within_daily: the newest of 2026-04-02"],
    671: ["keep_within_daily: the newest of 2026-04-01"],
    647: ["keep_within_daily: the newest of 2026-03-31"],
    623: ["keep_within_daily: the newest of 2026-03-30"],
    599: ["keep_within_daily: the newest of 2026-03-29", "keep_within_weekly: the newest of week 2026-W13"],
    575: ["keep_within_daily: the newest of 2026-03-28"],
    499: ["keep_labels: has the label milestone"],
    431: ["keep_within_weekly: the newest of week 2026-W12"],
    # Diverged: it is the week's newest, and takes nobody's place as that.
    263: ["keep_within_weekly: the newest of week 2026-W11"],
    262: ["keep_within_weekly: the newest of week 2026-W11"],
    99: ["keep_labels: has the label milestone"],
    95: ["keep_within_weekly: the newest of week 2026-W10"],
    # Nothing to do with the rules.
    80: ["resumed_from: attempt 2 resumed from it"],
    70: ["being_read: "],
    60: ["held: held by bob until it is released: case 7"],
    50: ["pinned: pinned by ann: paper"],
}
# Own chunks: 1,000 + i bytes in the first store, and of every second checkpoint 500 more in another one. Chunks that a
# pair shares (0 and 1, 2 and 3, …): 10,000 + the pair's number. What all share stays. Of the own chunks, that of 0 is
# another run's too, that of 1 is in the trash too (it goes), that of 2 is in the trash and pinned there (it stays), and
# an upload relies on that of 3. So of 698 that expire 695 own chunks go, 350 of them twice, and of 360 pairs 342.
FREED = (695 * 1000 + 248_817) + 350 * 500 + (342 * 10_000 + 60_823)


def rows_of_a_month(session: Session, store_id: int) -> str:
    """The catalog's rows; the run's name."""
    project = Project(id=uuid.uuid4().hex, name="demo", created_at=FIRST)
    second = Store(url="posix:///second", kind="posix", created_at=FIRST)
    session.add_all([project, second])
    session.flush()
    month = _Month(session, project.id, (store_id, second.id))
    run, attempt = month.run("gpt")
    ids = month.checkpoints(run, attempt, COUNT)
    other, theirs = month.run("other")
    month.checkpoint(other, theirs, 0, [month.own[0], month.base])
    month.checkpoint(run, attempt, 5, [month.own[1]], state="trashed")
    pinned = {"pinned_at": FIRST, "pinned_by": "ann", "pin_reason": "paper"}
    month.checkpoint(run, attempt, 6, [month.own[2]], state="trashed", **pinned)
    month.checkpoint(run, attempt, 999_999, [month.own[3]], state="uploading")
    month.put_in()
    _what_keeps(session, run, ids)
    return run.name


def _what_keeps(session: Session, run: Run, ids: list[str]) -> None:
    now = database_now(session)
    rows = {i: session.get_one(Checkpoint, ids[i]) for i in (50, 99, 263, 499)}
    rows[99].labels = rows[499].labels = ["milestone", "other"]
    rows[263].health, rows[263].health_reason = "diverged", "loss is nan"
    rows[50].pinned_at, rows[50].pinned_by, rows[50].pin_reason = now, "ann", "paper"
    lease = {"token_id": "t", "created_at": now, "expires_at": now + timedelta(hours=1)}
    session.add(ReadLease(id="l", checkpoint_id=ids[70], **lease))
    session.add(
        Hold(
            id="h",
            checkpoint_id=ids[60],
            kind="legal",
            reason="case 7",
            mirror=False,
            placed_at=now,
            placed_by_token="t",
            placed_by="bob",
        )
    )
    second = {"number": 2, "launch_id": "2", "resumed_from_id": ids[80], "world_size": 1, "host": "", "environment": {}}
    session.add(Attempt(run_id=run.id, opened_at=now, **second))
    run.latest_attempt = 2


class _Month:
    """Rows are gathered and put in at once: one by one they would take longer than the test."""

    def __init__(self, session: Session, project_id: str, store_ids: tuple[int, int]) -> None:
        self.session, self.project_id, self.store_ids = session, project_id, store_ids
        self._numbers = itertools.count(1)
        self._rows: dict[type[Table], list[dict[str, Any]]] = {}
        self.own: list[int] = []
        self.base = 0

    def put_in(self) -> None:
        for table in (Chunk, ChunkList, Checkpoint, ChunkListEntry, Shard, Copy):
            some = [row for row in self._rows[table] if "pinned_at" in row]
            for rows in (some, [row for row in self._rows[table] if "pinned_at" not in row]):
                if rows:
                    self.session.execute(insert(table), rows)

    def run(self, name: str) -> tuple[Run, Attempt]:
        run = Run(id=uuid.uuid4().hex, project_id=self.project_id, name=name, latest_attempt=1, created_at=FIRST)
        attempt = Attempt(
            run_id=run.id, number=1, launch_id="1", world_size=1, host="", environment={}, opened_at=FIRST
        )
        attempt.ended_at, attempt.outcome, attempt.cut_at = FIRST, "fenced", FIRST
        self.session.add(run)
        self.session.flush()
        self.session.add(attempt)
        self.session.flush()
        return run, attempt

    def checkpoints(self, run: Run, attempt: Attempt, count: int) -> list[str]:
        self.base = self._chunk(attempt, 1_000_000, 700)
        # Of no copy that is on its way in or out is anything freed.
        for state in ("pending", "gone", "deleting", "copying"):
            self._copy(attempt, self.base, 9, state)
        ids = []
        for i in range(count):
            self.own.append(self._chunk(attempt, 1000 + i, 500 if i % 2 == 0 else None))
            if i % 2 == 0:
                pair = self._chunk(attempt, 10_000 + i // 2, None)
            ids.append(self.checkpoint(run, attempt, i, [self.own[i], pair, self.base]))
        return ids

    def checkpoint(
        self, run: Run, attempt: Attempt, i: int, chunks: list[int], *, state: str = "committed", **more: Any
    ) -> str:
        checkpoint_id = f"ck_{uuid.uuid4().hex}"
        at = FIRST + timedelta(hours=i)
        row = {"id": checkpoint_id, "run_id": run.id, "attempt_id": attempt.id, "attempt_number": 1, "step": i * 100}
        row |= {"kind": "periodic", "world_size": 1, "state": state, "health": "ok", "tier": "hot", "digest": "0" * 64}
        row |= {"metrics": {}, "labels": [], "components": {}, "created_at": at, "deadline_at": at}
        self._add(Checkpoint, row | {"committed_at": None if state == "uploading" else at} | more)
        number = next(self._numbers)
        digest = f"{number:064}"
        row = {"id": number, "project_id": self.project_id, "digest": digest, "entries_digest": digest}
        self._add(ChunkList, row)
        for ordinal, chunk in enumerate(chunks):
            self._add(ChunkListEntry, {"chunk_list_id": number, "ordinal": ordinal, "chunk_id": chunk})
        shard = {"checkpoint_id": checkpoint_id, "rank": 0, "state": "sealed", "chunk_list_id": number}
        self._add(Shard, shard | {"components": {}, "finite": True})
        return checkpoint_id

    def _chunk(self, attempt: Attempt, first: int, second: int | None) -> int:
        number = next(self._numbers)
        row = {"id": number, "project_id": self.project_id, "digest": f"{number:064}", "bytes": first}
        self._add(Chunk, row | {"created_at": FIRST})
        self._copy(attempt, number, first, "verified")
        if second is not None:
            self._copy(attempt, number, second, "cold", self.store_ids[1])
        return number

    def _copy(self, attempt: Attempt, chunk: int, size: int, state: str, store_id: int | None = None) -> None:
        row = {"chunk_id": chunk, "project_id": self.project_id, "attempt_id": attempt.id, "state": state}
        row |= {"store_id": store_id or self.store_ids[0], "generation": uuid.uuid4().hex, "codec": "raw"}
        row |= {"stored_digest": f"{chunk:064}", "stored_bytes": size}
        self._add(Copy, row | {"proof": "store_sha256", "ticket_expires_at": FIRST, "created_at": FIRST})

    def _add(self, table: type[Table], row: dict[str, Any]) -> None:
        self._rows.setdefault(table, []).append(row)


@pytest.fixture
def month(service: RunningService) -> str:
    with service.context.database.transaction() as session:
        return rows_of_a_month(session, service.context.store_id)


def test_the_tiered_policy_keeps_exactly_what_the_table_says_and_frees_these_bytes(
    service: RunningService, month: str
) -> None:
    http = service.http()
    put = {"document": PRESETS["tiered"].rules()}
    answer(http.put("/v1/projects/demo/policies/retention", json=put))
    plan = answer(http.post(f"/v1/projects/demo/runs/{month}/retention/plan", json={}))
    shown = [one for one in plan["checkpoints"] if one["state"] == "committed"]
    assert [one["step"] for one in shown] == [i * 100 for i in reversed(range(COUNT))]
    found = {}
    for one in shown:
        reasons = [f"{reason['kind']}: {reason['detail']}" for reason in one["reasons"]]
        if one["keep"]:
            found[one["step"] // 100] = [r.partition("being read")[0] for r in reasons]
        else:
            assert reasons == ["no_rule: no rule keeps it"]
    assert found == EXPECTED
    assert (plan["kept"], plan["expired"]) == (len(EXPECTED) + 1, COUNT - len(EXPECTED))  # and the one that uploads
    assert plan["policy"]["level"] == "project"

    # The same figure by the other way: chunk by chunk, from the table and from what was put in.
    going = set(range(COUNT)) - set(EXPECTED)
    own = sum(1000 + i + (500 if i % 2 == 0 else 0) for i in going - {0, 2, 3})
    pairs = sum(10_000 + p for p in range(COUNT // 2) if {2 * p, 2 * p + 1} <= going)
    assert plan["freed"]["bytes"] == own + pairs == FREED
    assert set(plan["freed"]["by_store"]) == {service.context.settings.store, "posix:///second"}

    # What if: a policy that nobody has put, and only what expires of it.
    asked = {"policy": {"keep_last": 700}, "show": "expire"}
    plan = answer(http.post(f"/v1/projects/demo/runs/{month}/retention/plan", json=asked))
    # 700 healthy ones stay, and the diverged one beside them.
    assert [one["step"] for one in plan["checkpoints"]] == [i * 100 for i in reversed(range(19))]
    assert plan["policy_digest"] is None

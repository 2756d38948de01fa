"""`holdfast audit follow` against a service whose transactions commit in another order than they began."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from typer.testing import CliRunner

from holdfast_client.cli import events as events_command
from holdfast_client.cli.main import app
from tests.support.scripted_http import Seen, as_json, scripted
from tests.unit.test_client_transport import SERVER

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


def event(number: int, seconds_ago: int) -> dict[str, object]:
    facts = dict.fromkeys(("token_id", "project", "run", "checkpoint_id", "step", "reason", "before", "after"))
    at = NOW - timedelta(seconds=seconds_ago)
    return {**facts, "id": number, "at": at.isoformat(), "actor_kind": "person", "actor": "a", "action": "hold.place"}


def test_an_event_that_is_committed_behind_newer_ones_is_told_once_and_older_ones_are_not_taken_for_new(monkeypatch):
    committed = [event(number, 3600 - number) for number in range(1, 4)] + [event(number, 60) for number in (5, 6, 9)]
    later = [[event(10, 2)], [event(7, 30), event(4, 61)], [event(8, 29), event(11, 0)], []]

    def answer(seen: Seen):
        if seen.path != "/v1/audit-events":
            return as_json({**SERVER, "now": NOW.isoformat()})
        since = datetime.fromisoformat(seen.query["since"]) if "since" in seen.query else None
        found = [each for each in committed if since is None or datetime.fromisoformat(str(each["at"])) >= since]
        newest_first = sorted(found, key=lambda each: -int(str(each["id"])))
        start, limit = int(seen.query.get("cursor", 0)), int(seen.query["limit"])
        more = len(newest_first) > start + limit
        return as_json(
            {"items": newest_first[start : start + limit], "next_cursor": str(start + limit) if more else None}
        )

    def poll(_: float) -> None:
        """Stands for the two seconds between two looks."""
        if not later:
            raise KeyboardInterrupt
        committed.extend(later.pop(0))

    monkeypatch.setattr(events_command.time, "sleep", poll)
    with scripted(answer) as server:
        monkeypatch.setenv("HOLDFAST_URL", server.url)
        monkeypatch.setenv("HOLDFAST_TOKEN", "hold_id_secret")
        told = CliRunner().invoke(app, ["audit", "follow", "--json", "-n", "2"]).stdout
    assert [json.loads(line)["id"] for line in told.splitlines()] == [6, 9, 10, 4, 7, 8, 11]


def test_events_are_told_after_the_clock_that_dates_them_was_put_back(monkeypatch):
    """The service's clock is an hour ahead when the user begins, and has dated an event by then."""
    clock = [NOW + timedelta(hours=1)]
    committed = [event(1, -3600)]
    later = [[], [event(2, -10)], []]

    def answer(seen: Seen):
        if seen.path != "/v1/audit-events":
            return as_json({**SERVER, "now": clock[0].isoformat()})
        since = datetime.fromisoformat(seen.query["since"]) if "since" in seen.query else None
        found = [each for each in committed if since is None or datetime.fromisoformat(str(each["at"])) >= since]
        return as_json({"items": found[::-1], "next_cursor": None})

    def poll(_: float) -> None:
        if not later:
            raise KeyboardInterrupt
        clock[0] = NOW
        committed.extend(later.pop(0))

    monkeypatch.setattr(events_command.time, "sleep", poll)
    with scripted(answer) as server:
        monkeypatch.setenv("HOLDFAST_URL", server.url)
        monkeypatch.setenv("HOLDFAST_TOKEN", "hold_id_secret")
        told = CliRunner().invoke(app, ["audit", "follow", "--json"]).stdout
    assert [json.loads(line)["id"] for line in told.splitlines()] == [1, 2]

"""A client beside a service of an older minor version: what that does not know is left out, and the rest works."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast_protocol
from holdfast_client import Client, ClientSettings
from holdfast_client.errors import InvalidRequest
from holdfast_protocol.attempts import EndAttempt, Heartbeat, Notice
from holdfast_protocol.base import Request, body_for
from holdfast_protocol.states import AttemptOutcome, Doing
from tests.support.scripted_http import Reply, Seen, as_json, problem, scripted

HEARTBEAT = Heartbeat(epoch=1, attempt=3, step=7, steps_run=8, doing=Doing.TRAINING)
KNOWN_1_2: dict[str, list[str]] = json.loads((Path(__file__).parent / "protocol_1_2.json").read_text())
"""The fields of each request, as services of 1.2 know them."""
SHOWN = {
    "number": 3, "launch_id": "l", "world_size": 1, "host": "", "environment": {}, "opened_at": "2026-01-01T00:00:00Z",
    "heartbeat_at": None, "last_step": 7, "ended_at": None, "outcome": None, "outcome_detail": None,
    "resumed_from": None,
}  # fmt: skip


def _service(minor: list[int]) -> Any:
    """Refuses unknown fields as an older one does; `minor` is what it speaks now."""

    def answers(seen: Seen) -> Reply:
        beats = "heartbeat" in seen.path
        reply = as_json({"save_interval_seconds": 60.0} if beats else SHOWN)
        if minor[0] < 3 and set(seen.json) - set(KNOWN_1_2["Heartbeat" if beats else "EndAttempt"]):
            reply = problem("invalid_request", "body.doing: Extra inputs are not permitted. Correct the request.")
        reply.protocol = f"1.{minor[0]}"
        return reply

    return answers


def test_what_an_older_service_does_not_know_is_left_out_also_while_it_is_being_upgraded() -> None:
    minor = [2]
    with scripted(_service(minor)) as server, Client(ClientSettings(url=server.url, retry_seconds=0)) as client:
        assert client.attempts.heartbeat("demo", "gpt", 3, HEARTBEAT).save_interval_seconds == 60
        assert [set(seen.json) for seen in server.seen[1:]] == [{"epoch", "attempt", "step"}]
        client.attempts.heartbeat("demo", "gpt", 3, HEARTBEAT)
        assert len(server.seen) == 3, "what it does not know is known by now"
        end = EndAttempt(
            epoch=1, attempt=3, outcome=AttemptOutcome.PREEMPTED, detail="why", notice=Notice(source="aws"), steps_run=8
        )
        assert client.attempts.end("demo", "gpt", 3, end).first_step is None
        assert server.seen[-1].json == {"epoch": 1, "attempt": 3, "outcome": "preempted", "detail": "why"}
        minor[0] = 3
        client.attempts.heartbeat("demo", "gpt", 3, HEARTBEAT)
        client.attempts.heartbeat("demo", "gpt", 3, HEARTBEAT)
        assert server.seen[-1].json["steps_run"] == 8
        minor[0] = 2  # one of several processes is still the old one
        client.attempts.heartbeat("demo", "gpt", 3, HEARTBEAT)
        assert "steps_run" not in server.seen[-1].json


def test_a_request_that_is_wrong_for_a_service_of_the_same_version_is_told_once() -> None:
    with (
        scripted(lambda seen: problem("invalid_request")) as server,
        Client(ClientSettings(url=server.url, retry_seconds=0)) as client,
    ):
        with pytest.raises(InvalidRequest):
            client.attempts.heartbeat("demo", "gpt", 3, HEARTBEAT)
        assert len(server.seen) == 1


def test_every_field_that_is_newer_than_1_2_is_marked_so() -> None:
    for module in pkgutil.iter_modules(holdfast_protocol.__path__):
        importlib.import_module(f"holdfast_protocol.{module.name}")
    for model in _requests(Request):
        known = KNOWN_1_2.get(model.__name__)
        if known is not None:
            sent = json.loads(body_for(2, model.model_construct()))
            assert set(sent) <= set(known), f"{model.__name__}: give what is new `json_schema_extra=since(…)`"


def _requests(model: type[Request]) -> Iterator[type[Request]]:
    for each in model.__subclasses__():
        yield each
        yield from _requests(each)

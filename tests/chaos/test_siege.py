"""Halves of requests, wrong tokens and a greedy project at once: another project's saves are all committed. How fast
is a matter of `make siege`."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from benchmarks.siege.attack import possible_connections
from benchmarks.siege.siege import SAVERS, Besieged, besieged, unsent

from holdfast_service.serve import connections_within
from holdfast_service.settings import ServiceSettings

WANTED = 10_000
EACH = 5
IN_BETWEEN = 200


@pytest.fixture
def open_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.rule("limits-before-work")
@pytest.mark.usefixtures("open_files")
def test_another_projects_saves_go_on_under_siege(tmp_path: Path) -> None:
    connections = possible_connections(WANTED)
    # The service may have as many files as this process.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    places = connections_within(ServiceSettings().most_connections, hard)
    print(f"\n{connections} halves of requests (the hard limit of open files is {hard}), {places} places")
    with besieged(tmp_path) as place:
        before = place.save(EACH)
        with place.attacked(connections) as attackers:
            attackers.until(
                lambda counted: (
                    counted.get("halves opened", 0) >= connections
                    and counted.get("wrong 429", 0) > 100
                    and counted.get("greedy 200", 0) > 0
                    and counted.get("greedy 429", 0) > 0
                )
            )
            # Some have come since, and those that make room for them are not closed yet.
            until = time.monotonic() + 120
            while (open_at_once := place.connections()) > places + IN_BETWEEN and time.monotonic() < until:
                time.sleep(0.1)
            began = dict(attackers.counted)
            during = place.save(EACH)
            # It went on all the while.
            attackers.until(
                lambda counted: all(counted[name] > began[name] for name in ("wrong 429", "greedy 200", "greedy 429"))
            )
            counted = attackers.counted
        _judge(place, [*before.ids, *during.ids])
    assert unsent(counted["halves open"], {name: counted[name] - began.get(name, 0) for name in counted}) == []
    print(f"{before.per_second:.1f} saves/s before, {during.per_second:.1f} under siege; {open_at_once} connections")
    print(counted)
    assert min(connections, places) * 0.9 <= open_at_once <= places + IN_BETWEEN
    assert counted["halves cut off"] >= connections - places, "those too many took places from each other"
    assert set(counted) <= {
        *("halves opened", "halves open", "halves cut off", "not connected", "wrong cut off", "greedy cut off"),
        *("wrong sent", "wrong hung up", "greedy sent"),
        *("wrong 401", "wrong 429", "wrong 503", "greedy 200", "greedy 429", "greedy 503"),
    }, "every call got an answer that says what it is"


@pytest.mark.parametrize(
    ("kind", "counted"),
    [
        ("greedy", {"greedy sent": 0, "greedy 429": 0, "greedy 200": 0}),
        ("greedy", {"greedy 429": 0, "greedy 200": 0}),
        ("wrong", {"wrong sent": 0}),
        ("wrong", {"wrong hung up": 0}),
        ("wrong", {"wrong 429": 0}),
    ],
)
def test_what_was_measured_without_one_of_the_attacks_is_no_measurement(kind: str, counted: dict[str, int]) -> None:
    whole = {
        "wrong sent": 100,
        "wrong hung up": 90,
        "wrong 401": 1,
        "wrong 429": 99,
        "greedy sent": 20,
        "greedy 200": 10,
        "greedy 429": 10,
    }
    assert unsent(5000, whole) == []
    assert unsent(5000, whole | counted) == [kind]
    assert unsent(0, whole) == ["halves"]


def _judge(place: Besieged, ids: list[str]) -> None:
    assert len(set(ids)) == 2 * EACH * SAVERS
    assert {place.state_of(each) for each in ids} == {"committed"}
    assert httpx.get(f"{place.service.url}/readyz", timeout=60).status_code == 200

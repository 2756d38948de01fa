"""The proxy that the network tests stand on does what its script says, and leaves nothing behind."""

from __future__ import annotations

import threading
import time

import pytest
import urllib3

from tests.support.fault_proxy import (
    SLOW_DOWN,
    BlackHole,
    CutBefore,
    CutReply,
    CutRequest,
    Delay,
    DropReply,
    FaultProxy,
    Held,
    Throttle,
    fault_proxy,
)
from tests.support.scripted_http import Reply, ScriptedServer, scripted

BODY = bytes(range(256)) * 400


@pytest.fixture
def server():
    with scripted(lambda seen: Reply(200, BODY if seen.method == "GET" else b"")) as running:
        yield running


@pytest.fixture
def proxy(server: ScriptedServer):
    with fault_proxy(int(server.url.rpartition(":")[2])) as running:
        yield running


@pytest.fixture
def http():
    with urllib3.PoolManager(retries=False, timeout=60) as pool:
        yield pool


def test_without_a_fault_everything_passes_unchanged(proxy: FaultProxy, server, http):
    replied = http.request("PUT", f"{proxy.url}/bucket/key?secret=1", body=BODY, headers={"X-Own": "a b"})
    assert (replied.status, server.seen[0].body, server.seen[0].headers["x-own"]) == (200, BODY, "a b")
    assert server.seen[0].headers["host"] == f"127.0.0.1:{proxy.port}"
    assert server.seen[0].query == {"secret": "1"}
    assert http.request("GET", f"{proxy.url}/bucket/key").data == BODY
    assert [(seen.method, seen.path, seen.status) for seen in proxy.seen] == [
        ("PUT", "/bucket/key", 200),
        ("GET", "/bucket/key", 200),
    ]


@pytest.mark.parametrize(
    ("fault", "reached"),
    [(CutBefore(), 0), (CutRequest(), 0), (DropReply(), 1), (CutReply(), 1), (BlackHole(0.1), 0)],
    ids=lambda value: type(value).__name__,
)
def test_a_cut_connection_is_an_error_here_and_what_was_asked_for_there(
    proxy: FaultProxy, server, http, fault, reached
):
    proxy.script(fault, on="put")
    with pytest.raises(urllib3.exceptions.HTTPError):
        http.request("PUT", f"{proxy.url}/key", body=BODY)
    # The server counts only whole requests.
    assert len([seen for seen in server.seen if seen.body == BODY]) == reached
    assert http.request("PUT", f"{proxy.url}/key", body=BODY).status == 200
    assert [seen.fault for seen in proxy.seen] == [fault, None]


def test_a_reply_is_cut_in_the_middle_of_its_body(proxy: FaultProxy, http):
    proxy.script(CutReply(0.5), on="get")
    reply = http.request("GET", f"{proxy.url}/key", preload_content=False)
    assert reply.headers["content-length"] == str(len(BODY))
    assert reply.read(len(BODY) // 2) == BODY[: len(BODY) // 2]
    with pytest.raises(urllib3.exceptions.HTTPError):
        reply.read()


def test_somebody_else_answers(proxy: FaultProxy, server, http):
    proxy.script(SLOW_DOWN, on="put", skip=1, times=1)
    replies = [http.request("PUT", f"{proxy.url}/key", body=BODY) for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 503, 200]
    assert b"<Code>SlowDown</Code>" in replies[1].data
    assert len(server.seen) == 2


def test_delay_and_throttle_take_their_time(proxy: FaultProxy, http):
    proxy.script(Delay(0.2), on="put")
    proxy.script(Throttle(len(BODY) / 0.3), on="get")
    began = time.monotonic()
    assert http.request("PUT", f"{proxy.url}/key", body=BODY).status == 200
    assert http.request("GET", f"{proxy.url}/key").data == BODY
    assert time.monotonic() - began >= 0.5


def test_what_is_held_goes_on_when_it_is_let_go(proxy: FaultProxy, server, http):
    let_go, statuses = threading.Event(), []
    proxy.script(Held(let_go), on="put")
    held = threading.Thread(target=lambda: statuses.append(http.request("PUT", f"{proxy.url}/key", body=BODY).status))
    held.start()
    while not proxy.struck():
        held.join(0.01)
    assert http.request("GET", f"{proxy.url}/key").data == BODY
    assert [seen.method for seen in server.seen] == ["GET"], "the server has not heard of the other one"
    let_go.set()
    held.join()
    assert statuses == [200]


def test_an_outage_cuts_what_runs_and_refuses_what_comes(proxy: FaultProxy, http):
    proxy.script(BlackHole(), on="get")
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            http.request("GET", f"{proxy.url}/key")
        except urllib3.exceptions.HTTPError as error:
            failed.append(error)

    waiting = threading.Thread(target=ask)
    waiting.start()
    while not proxy.count("get"):
        waiting.join(0.01)
    proxy.refuse()
    waiting.join()
    assert len(failed) == 1
    with pytest.raises(urllib3.exceptions.NewConnectionError):
        http.request("PUT", f"{proxy.url}/key", body=BODY)
    proxy.accept()
    assert http.request("PUT", f"{proxy.url}/key", body=BODY).status == 200


def test_the_same_seed_gives_the_same_storm(proxy: FaultProxy, http):
    struck = []
    for _ in range(2):
        proxy.heal()
        proxy.storm(7, 0.5, [SLOW_DOWN, Delay(0.0)])
        for _ in range(12):
            http.request("PUT", f"{proxy.url}/key", body=BODY)
        struck.append([seen.fault for seen in proxy.seen])
    assert struck[0] == struck[1]
    assert any(fault is None for fault in struck[0])
    assert any(fault is not None for fault in struck[0])


def test_closing_leaves_no_thread_behind(server):
    before = set(threading.enumerate())
    with fault_proxy(int(server.url.rpartition(":")[2])) as proxy, urllib3.PoolManager() as http:
        assert http.request("GET", f"{proxy.url}/key").data == BODY
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(10)  # the server's own end with their connections
    assert not any(thread.is_alive() for thread in left)

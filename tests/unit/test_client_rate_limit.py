"""How fast chunks move: the decisions with a clock of their own, then against a store that bears only so much."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time

import pytest

from holdfast_client import Client, ClientSettings, errors
from holdfast_client.chunks import connections
from holdfast_client.chunks.connections import (
    BURST_SECONDS,
    LONGEST_HOLD_SECONDS,
    PROBE_STRETCHES,
    ByteRate,
    RateLimit,
    TransferWindow,
)
from holdfast_client.chunks.transfer import get_chunk, put_chunk
from holdfast_client.chunks.workers import Jobs, TransferWorkers
from holdfast_client.transport import Backoff
from holdfast_protocol.checkpoints import UploadTicket
from holdfast_protocol.restores import ReadTicket
from tests.support.scripted_http import Reply, scripted


def window_after_refusal(running: int) -> TransferWindow:
    window = TransferWindow(lambda failures: 0.0)
    window.refused(0, running, now=0.0, retry_after_seconds=0)
    return window


class TestWindow:
    def test_without_a_refusal_there_is_no_limit(self):
        window = TransferWindow(lambda failures: 0.0)
        for _ in range(100):
            window.succeeded(0, waiting=5)
        assert (window.limit, window.wait_seconds(1000, now=0.0)) == (None, 0)

    def test_a_refusal_halves_what_runs_and_never_below_one(self):
        window = TransferWindow(lambda failures: 0.0)
        limits = []
        for cut in range(5):
            window.refused(cut, running=9, now=0.0, retry_after_seconds=0)
            limits.append(window.limit)
        assert limits == [4, 2, 1, 1, 1]

    def test_all_the_refusals_of_one_round_trip_are_one_cut(self):
        window = window_after_refusal(8)
        for _ in range(7):
            window.refused(0, running=8, now=0.0, retry_after_seconds=0)
        assert window.limit == 4

    def test_successes_of_before_the_cut_say_nothing_about_after_it(self):
        window = window_after_refusal(8)
        for _ in range(100):
            window.succeeded(0, waiting=4)
        assert window.limit == 4

    def test_a_stretch_of_successes_adds_one_while_somebody_waits(self):
        window = window_after_refusal(8)
        for _ in range(4):
            window.succeeded(1, waiting=4)
        assert window.limit == 5
        for _ in range(100):
            window.succeeded(1, waiting=0)
        assert window.limit == 5, "as many as there are workers is enough"

    def test_the_number_that_was_refused_is_tried_again_late_and_then_growth_goes_on(self):
        window = window_after_refusal(4)
        successes_until = {}
        for count in range(1, 100):
            before = window.limit
            window.succeeded(1, waiting=4)
            if window.limit != before:
                successes_until[window.limit] = count
        assert successes_until[3] == 2
        assert successes_until[4] - successes_until[3] == 3 * PROBE_STRETCHES
        assert successes_until[5] - successes_until[4] == 4

    def test_at_the_limit_the_next_waits_for_one_to_end(self):
        window = window_after_refusal(8)
        assert window.wait_seconds(4, now=0.0) is None
        assert window.wait_seconds(3, now=0.0) == 0

    def test_a_retry_after_holds_everybody_back_and_not_for_ever(self):
        window = TransferWindow(lambda failures: 0.0)
        window.refused(0, running=2, now=100.0, retry_after_seconds=7)
        assert window.wait_seconds(0, now=101.0) == 6
        window.refused(0, running=2, now=101.0, retry_after_seconds=99999)
        assert window.wait_seconds(0, now=101.0) == LONGEST_HOLD_SECONDS

    def test_the_pause_grows_with_the_refusals_in_a_row_and_a_success_ends_the_row(self):
        asked = []
        window = TransferWindow(lambda failures: asked.append(failures) or 1.0)
        window.refused(0, running=1, now=0.0, retry_after_seconds=0)
        window.refused(1, running=1, now=10.0, retry_after_seconds=0)
        assert window.wait_seconds(0, now=10.5) == 0.5
        window.succeeded(2, waiting=0)
        window.refused(2, running=1, now=20.0, retry_after_seconds=0)
        assert asked == [1, 2, 1]


class TestByteRate:
    def test_bytes_come_at_the_rate_after_a_short_burst(self):
        rate = ByteRate(1000, now=0.0)
        now, moved = 10.0, 0
        while now < 20.0:
            now += rate.acquire(50, now)
            moved += 50
        assert moved == pytest.approx(1000 * (10 + BURST_SECONDS), abs=100)

    def test_who_asks_at_once_goes_one_after_the_other(self):
        rate = ByteRate(1000, now=0.0)
        assert [rate.acquire(500, now=0.0) for _ in range(3)] == [0, 0.5, 1.0]

    def test_a_pause_is_no_licence_to_flood(self):
        rate = ByteRate(1000, now=0.0)
        waits = [rate.acquire(250, now=3600.0) for _ in range(4)]
        assert waits == [0, 0, 0.25, 0.5]

    def test_slices_are_small_where_the_rate_is(self):
        assert [ByteRate(rate, 0.0).slice_bytes for rate in (65536, 64 * 2**20)] == [4096, 2**20]


class Store:
    """Bears `most` requests at once; more are told SlowDown."""

    def __init__(self, most: int, body: bytes) -> None:
        self.most = most
        self.body = body
        self.running = 0
        self.refused = 0
        self.served = 0
        self._lock = threading.Lock()

    def __call__(self, seen) -> Reply:
        with self._lock:
            self.running += 1
            too_many = self.running > self.most
        try:
            if too_many:
                with self._lock:
                    self.refused += 1
                return Reply(503, b"<Error><Code>SlowDown</Code></Error>", protocol=None)
            time.sleep(0.01)
            with self._lock:
                self.served += 1
            return Reply(200, b"" if seen.method == "PUT" else self.body, protocol=None)
        finally:
            with self._lock:
                self.running -= 1


BODY = os.urandom(20_000)
DIGEST = hashlib.sha256(BODY).hexdigest()


def client_of(url: str, **settings) -> Client:
    return Client(ClientSettings(url=url, token="t", **{"retry_seconds": 60, **settings}))


def put(client: Client, stop: threading.Event | None = None, **options) -> None:
    ticket = UploadTicket(kind="http", url="/key?sig=1", headers={}, expires_in_seconds=60)
    put_chunk(ticket, memoryview(BODY), client.transfers, stop=stop, **options)


def get(client: Client, stop: threading.Event | None = None) -> None:
    ticket = ReadTicket(
        digest=DIGEST, bytes=len(BODY), stored_bytes=len(BODY), kind="http", url="/key?sig=1", expires_in_seconds=60
    )
    get_chunk(ticket, None, DIGEST, len(BODY), client.transfers, stop=stop)


def many(client: Client, work, count: int, workers: int = 8) -> None:
    stop = threading.Event()
    with TransferWorkers(workers) as threads:
        jobs: Jobs[int, None] = Jobs(stop)
        for number in range(count):
            jobs.start(threads.transfers, number, lambda: work(client, stop))
        errors_met = [done.error for done in (jobs.next() for _ in range(count)) if done and done.error]
    assert errors_met == []


@pytest.mark.parametrize("work", [put, get])
def test_a_store_that_bears_little_gets_little_and_all_of_it_arrives(work, monkeypatch):
    monkeypatch.setattr(connections, "jittered_seconds", lambda failures: 0.0)
    store = Store(3, BODY)
    with scripted(store) as server, client_of(server.url) as client:
        many(client, work, 200)
        assert store.served == 200
        assert store.refused < 60, "a cut every few stretches, whatever eight workers would like"
        store.most = 100
        many(client, work, 300)
        assert client.transfers.rate_limit.limit == 8, "all the workers have their turn again"


def test_refusals_draw_no_random_number_that_training_would_have_drawn(monkeypatch):
    random.seed(3)
    expected = random.Random(3).random()
    with scripted(Store(1, BODY)) as server, client_of(server.url) as client:
        many(client, put, 20, workers=4)
    assert random.random() == expected


def test_a_waiter_hears_the_stop():
    pace, stop = RateLimit(), threading.Event()
    with pace.permit(None, None) as permit:
        permit.status = 503
    stop.set()
    with pace.permit(None, None), pytest.raises(errors.TransferStopped):
        pace.permit(stop, None).__enter__()


def test_a_hold_is_heard_by_all_and_ends_by_the_stop():
    pace, stop = RateLimit(), threading.Event()
    with pace.permit(None, None) as permit:
        permit.status, permit.retry_after_seconds = 503, 50.0
    threading.Timer(0.05, stop.set).start()
    with pytest.raises(errors.TransferStopped), pace.permit(stop, None):
        pass


def test_waiting_for_ones_turn_while_others_get_through_costs_no_retry_deadline(monkeypatch):
    left_out = []
    monkeypatch.setattr(Backoff, "leave_out", lambda backoff, seconds: left_out.append(seconds))
    pace, inside = RateLimit(), threading.Event()
    with pace.permit(None, None) as permit:
        permit.status = 503

    def wait_for_a_turn():
        with pace.permit(None, Backoff(1.0)):
            pass

    for status in (500, 200):
        waiter = threading.Thread(target=wait_for_a_turn)
        with pace.permit(None, None) as permit:
            waiter.start()
            while not pace._waiting:
                inside.wait(0.01)
            permit.status = status
        waiter.join()
    assert len(left_out) == 1, "a store that serves nobody is waited for, and no longer than that"


def test_an_answer_whose_body_breaks_off_is_no_success():
    pace = RateLimit()
    with pace.permit(None, None) as permit:
        permit.status = 503

    def break_off():
        with pace.permit(None, None) as permit:
            permit.status = 200
            raise OSError("broke")

    for _ in range(100):
        with pytest.raises(OSError, match="broke"):
            break_off()
    assert pace.limit == 1
    assert pace._successes == 0


def test_a_store_that_does_not_answer_in_time_gets_less():
    answers = threading.Event()

    def slow_at_first(seen) -> Reply:
        answers.wait(60)
        return Reply(200, b"", protocol=None)

    with scripted(slow_at_first) as server, client_of(server.url, timeout_seconds=0.2) as client:
        with pytest.raises(errors.StoreUnavailable, match="ReadTimeoutError"):
            put(client, retry_seconds=0)
        assert client.transfers.rate_limit.limit == 1
        answers.set()
        put(client)


@pytest.mark.parametrize("work", [put, get])
def test_the_rate_bounds_both_directions(work):
    with scripted(Store(100, BODY)) as server, client_of(server.url, max_bytes_per_second=200_000) as client:
        began = time.monotonic()
        many(client, work, 20)
        assert time.monotonic() - began >= 20 * len(BODY) / 200_000 - BURST_SECONDS - 0.1


def test_a_rate_is_shared_by_uploads_and_downloads_and_by_clients_with_another_retry_deadline():
    with client_of("http://127.0.0.1:9") as client:
        assert client.with_retry_deadline(900, threading.Event()).transfers.rate_limit is client.transfers.rate_limit


def test_a_slow_transfer_hears_the_stop_between_two_slices():
    stop = threading.Event()
    with scripted(Store(100, BODY)) as server, client_of(server.url, max_bytes_per_second=65536) as client:
        client.transfers.rate_limit.acquire(60 * 65536, None)
        threading.Timer(0.05, stop.set).start()
        with pytest.raises(errors.TransferStopped):
            put(client, stop)


def test_a_rate_that_no_store_would_wait_for_is_refused():
    with pytest.raises(errors.ConfigurationError, match="HOLDFAST_MAX_BYTES_PER_SECOND"):
        ClientSettings(max_bytes_per_second=1000)


def test_a_chunk_that_was_slow_before_it_failed_has_its_whole_retry_deadline():
    backoff = Backoff(5.0, sleep=lambda seconds: None, from_failure=True)
    backoff._total_seconds = 1000.0
    assert backoff.pause(500)
    assert not backoff.pause(1000)

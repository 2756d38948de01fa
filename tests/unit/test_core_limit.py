"""As many threads compute at once as there are cores, and none waits for one that hangs."""

import threading

import pytest

from holdfast_client.chunks import workers as core_limit
from holdfast_client.chunks.workers import CoreLimit


def test_no_more_at_once_than_the_limit_and_everybody_gets_through(monkeypatch):
    monkeypatch.setattr(core_limit, "LONGEST_WAIT_SECONDS", 60.0)
    cores, lock, pause = CoreLimit(2), threading.Lock(), threading.Event()
    at_once, most, done = 0, 0, []

    def work() -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        pause.wait(0.005)
        with lock:
            at_once -= 1

    threads = [threading.Thread(target=lambda: done.append(cores.run(work))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most <= 2
    assert len(done) == 12


def test_room_is_given_back_whatever_becomes_of_the_work(monkeypatch):
    monkeypatch.setattr(core_limit, "LONGEST_WAIT_SECONDS", 60.0)
    cores = CoreLimit(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            cores.run(lambda: 1 // 0)
    assert cores.run(lambda: "mine") == "mine"


def test_a_write_that_hangs_holds_up_nobody_else(monkeypatch):
    monkeypatch.setattr(core_limit, "LONGEST_WAIT_SECONDS", 0.01)
    cores, began, ends = CoreLimit(1), threading.Event(), threading.Event()

    def hangs() -> None:
        began.set()
        ends.wait()

    stuck = threading.Thread(target=cores.run, args=(hangs,))
    stuck.start()
    began.wait()
    assert cores.run(lambda: "beside it") == "beside it"
    ends.set()
    stuck.join()

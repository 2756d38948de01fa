"""As many threads compute at once as there are cores, and none waits for one that hangs."""

import threading

import pytest

from holdfast_client.chunks import core_turns
from holdfast_client.chunks.core_turns import CoreTurns


def test_no_more_at_once_than_there_are_turns_and_everybody_comes_to_one():
    turns, lock, pause = CoreTurns(2), threading.Lock(), threading.Event()
    at_once, most, done = 0, 0, []

    def work() -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        pause.wait(0.005)
        with lock:
            at_once -= 1

    threads = [threading.Thread(target=lambda: done.append(turns.run(work))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most <= 2
    assert len(done) == 12


def test_a_turn_is_given_back_whatever_becomes_of_it(monkeypatch):
    monkeypatch.setattr(core_turns, "LONGEST_WAIT_SECONDS", 60.0)
    turns = CoreTurns(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            turns.run(lambda: 1 // 0)
    assert turns.run(lambda: "mine") == "mine"


def test_a_write_that_hangs_holds_up_nobody_else(monkeypatch):
    monkeypatch.setattr(core_turns, "LONGEST_WAIT_SECONDS", 0.01)
    turns, began, ends = CoreTurns(1), threading.Event(), threading.Event()

    def hangs() -> None:
        began.set()
        ends.wait()

    stuck = threading.Thread(target=turns.run, args=(hangs,))
    stuck.start()
    began.wait()
    assert turns.run(lambda: "beside it") == "beside it"
    ends.set()
    stuck.join()

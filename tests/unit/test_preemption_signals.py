"""A signal is seen at once, whatever the main thread is in; whoever listened before still hears it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import threading

import pytest

from holdfast.preemption.signals import SignalWatch
from tests.support.wakeup_fd import wakeup_fd

SIGNAL = signal.SIGUSR1
WAIT_SECONDS = 30


@pytest.fixture(autouse=True)
def _as_it_was():
    handler, fd = signal.getsignal(SIGNAL), wakeup_fd()
    yield
    assert signal.getsignal(SIGNAL) is handler
    assert wakeup_fd() == fd


class Seen:
    def __init__(self):
        self.signals = []
        self.event = threading.Event()

    def __call__(self, number):
        self.signals.append(number)
        self.event.set()


@pytest.mark.rule("sigterm-thread")
def test_a_signal_is_seen_while_the_main_thread_is_inside_a_call_that_does_not_come_back():
    seen, ran = Seen(), []
    earlier = signal.signal(SIGNAL, lambda *_: ran.append(True))
    watch = SignalWatch([SIGNAL], seen)
    enters, in_time = threading.Event(), []

    def send():
        enters.wait()
        os.kill(os.getpid(), SIGNAL)
        # No Python handler has run by then: the main thread is in C.
        in_time.append(seen.event.wait(WAIT_SECONDS) and not ran)

    sender = threading.Thread(target=send)
    sender.start()
    # Sent at its begin, the signal has all of the call's time to be seen in.
    enters.set()
    hashlib.pbkdf2_hmac("sha256", b"collective", b"", 10_000_000)
    sender.join()
    watch.close()
    signal.signal(SIGNAL, earlier)
    assert in_time == [True]
    assert seen.signals == [SIGNAL]
    assert ran == [True], "the handler that was there before is still served"


def test_an_earlier_wakeup_fd_still_gets_every_signal():
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    before = signal.set_wakeup_fd(write_fd)
    seen = Seen()
    watch = SignalWatch([SIGNAL], seen)
    os.kill(os.getpid(), SIGNAL)
    assert os.read(read_fd, 1) == bytes([SIGNAL])
    assert seen.event.wait(WAIT_SECONDS)
    watch.close()
    assert signal.set_wakeup_fd(before) == write_fd
    os.close(read_fd)
    os.close(write_fd)


def test_a_second_signal_does_not_end_the_process_and_is_told_too():
    seen = Seen()
    watch = SignalWatch([SIGNAL], seen)
    for _ in range(2):
        seen.event.clear()
        os.kill(os.getpid(), SIGNAL)
        assert seen.event.wait(WAIT_SECONDS)
    watch.close()
    assert seen.signals == [SIGNAL, SIGNAL]


@pytest.mark.rule("sigterm-thread")
def test_a_signal_is_seen_while_an_event_loop_has_the_wakeup_fd_and_after_it_has_left_none():
    seen = Seen()
    watch = SignalWatch([SIGNAL], seen)

    async def script():
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, lambda: None)
        os.kill(os.getpid(), SIGNAL)
        assert await asyncio.to_thread(seen.event.wait, WAIT_SECONDS)

    asyncio.run(script())
    assert wakeup_fd() == -1
    seen.event.clear()
    os.kill(os.getpid(), SIGNAL)
    assert seen.event.wait(WAIT_SECONDS)
    assert wakeup_fd() != -1, "the next one is seen inside a collective again"
    watch.close()
    assert seen.signals == [SIGNAL, SIGNAL]


@pytest.mark.rule("sigterm-thread")
def test_two_watches_both_hear_where_no_wakeup_fd_is_left():
    first, second = Seen(), Seen()
    inner = SignalWatch([SIGNAL], first)
    outer = SignalWatch([SIGNAL], second)
    signal.set_wakeup_fd(-1)
    os.kill(os.getpid(), SIGNAL)
    assert first.event.wait(WAIT_SECONDS)
    assert second.event.wait(WAIT_SECONDS)
    outer.close()
    inner.close()
    assert (first.signals, second.signals) == ([SIGNAL], [SIGNAL])


@pytest.mark.rule("sigterm-thread")
def test_a_forked_child_dies_of_its_signal_and_its_parent_hears_nothing_of_it():
    seen = Seen()
    watch = SignalWatch([SIGNAL], seen)
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), SIGNAL)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == SIGNAL
    assert SIGNAL not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    os.kill(os.getpid(), SIGNAL)
    assert seen.event.wait(WAIT_SECONDS)
    watch.close()
    assert seen.signals == [SIGNAL], "its own, and not the child's"


@pytest.mark.parametrize("inner_first", [False, True])
def test_two_watches_both_hear_and_may_close_in_any_order(inner_first):
    first, second = Seen(), Seen()
    inner = SignalWatch([SIGNAL], first)
    outer = SignalWatch([SIGNAL], second)
    os.kill(os.getpid(), SIGNAL)
    assert first.event.wait(WAIT_SECONDS)
    assert second.event.wait(WAIT_SECONDS)
    for watch in (inner, outer) if inner_first else (outer, inner):
        watch.close()


def test_an_earlier_wakeup_fd_is_served_past_a_watch_that_closed_first():
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    before = signal.set_wakeup_fd(write_fd)
    seen = Seen()
    inner = SignalWatch([SIGNAL], Seen())
    outer = SignalWatch([SIGNAL], seen)
    inner.close()
    os.kill(os.getpid(), SIGNAL)
    assert seen.event.wait(WAIT_SECONDS)
    assert os.read(read_fd, 1) == bytes([SIGNAL])
    outer.close()
    assert signal.set_wakeup_fd(before) == write_fd
    os.close(read_fd)
    os.close(write_fd)


def test_outside_of_the_main_thread_nothing_is_installed(caplog):
    made = []
    thread = threading.Thread(target=lambda: made.append(SignalWatch([SIGNAL], Seen())))
    thread.start()
    thread.join()
    assert not made[0].installed
    assert "not made on the main thread" in caplog.text
    made[0].close()

"""Which state is saved before the deadline: the newest that can be finished."""

from __future__ import annotations

import math

import pytest

from holdfast.preemption.estimate import Choice, Numbers, decide, may_wait_for_a_step
from holdfast.preemption.notice import Notice
from holdfast.save.job import SaveRates


def rank(left=30.0, saved=False, in_flight=None, new=5.0):
    return Numbers(left, saved, in_flight is not None, in_flight if in_flight is None or in_flight >= 0 else None, new)


@pytest.mark.rule("finish-or-supersede")
@pytest.mark.parametrize(
    ("ranks", "choice"),
    [
        pytest.param([rank(), rank()], Choice.NEW, id="nothing in flight"),
        pytest.param([rank(left=1)], Choice.NEW, id="nothing in flight and no time: it is tried"),
        pytest.param([rank(new=None)], Choice.NEW, id="nothing measured"),
        pytest.param([rank(in_flight=5), rank(in_flight=6)], Choice.BOTH, id="both fit"),
        pytest.param([rank(in_flight=20, new=8), rank(in_flight=3, new=8)], Choice.SUPERSEDE, id="the slowest counts"),
        pytest.param([rank(left=9, in_flight=5), rank(in_flight=3)], Choice.SUPERSEDE, id="the earliest deadline"),
        pytest.param([rank(left=5.5, in_flight=2)], Choice.IN_FLIGHT, id="only what is in flight"),
        pytest.param([rank(left=1, in_flight=2)], Choice.IN_FLIGHT, id="neither: it has a head start"),
        pytest.param([rank(in_flight=-1, new=None)], Choice.BOTH, id="not known: nothing is thrown away"),
        pytest.param([rank(in_flight=5), rank(in_flight=5, new=None)], Choice.BOTH, id="one rank does not know"),
        pytest.param([rank(left=math.inf, in_flight=500)], Choice.BOTH, id="no deadline"),
        pytest.param([rank(saved=True, in_flight=5)] * 2, Choice.SAVED, id="this very step is on its way"),
        pytest.param([rank(), rank(in_flight=5)], Choice.BOTH, id="one rank has not finished"),
    ],
)
def test_the_newest_state_that_can_be_finished_is_chosen(ranks, choice):
    assert decide(ranks).choice is choice


@pytest.mark.parametrize(("new", "choice"), [(5, Choice.SUPERSEDE), (50, Choice.IN_FLIGHT), (None, Choice.IN_FLIGHT)])
def test_a_save_that_has_not_finished_as_it_was_estimated_to_is_not_waited_for_again(new, choice):
    assert decide([rank(in_flight=0, new=new)], has_waited=True).choice is choice


def test_a_save_is_given_up_only_if_the_new_one_fits_and_both_do_not():
    for tenths in range(300):
        left = tenths / 10
        chosen = decide([rank(left=left, in_flight=6, new=4)]).choice
        expected = Choice.BOTH if left >= 12 else Choice.SUPERSEDE if left >= 4.8 else Choice.IN_FLIGHT
        assert chosen is expected, left


@pytest.mark.rule("finish-or-supersede")
@pytest.mark.parametrize(
    ("left", "seconds", "waits"),
    [
        pytest.param(30, 5, 22.8, id="the last moment at which it would fit"),
        pytest.param(30, None, 15, id="nothing measured: half of the time"),
        pytest.param(4.3, 6, 1.0, id="it does not fit as estimated: the step that is running still may end"),
        pytest.param(2, 6, 0.5, id="hardly any time"),
    ],
)
def test_what_is_staged_waits_for_a_step_to_end(left, seconds, waits):
    assert may_wait_for_a_step(left, seconds) == pytest.approx(waits)


def test_the_slowest_of_the_last_saves_is_what_the_next_one_is_taken_to_be_as_slow_as():
    rates = SaveRates()
    assert rates.seconds_for(100) is None
    for seconds in (50, 1, 4, 2):
        rates.committed(100, seconds)
    assert rates.seconds_for(200) == pytest.approx(8)


def test_a_notice_travels_with_the_time_that_is_left():
    notice = Notice("aws", "spot interruption", 120.0)
    assert Notice.of(notice.word(0.5)) == Notice("aws", "spot interruption", 119.5)
    assert Notice.of(Notice("azure", "redeploy", None).word(3)) == Notice("azure", "redeploy", None)

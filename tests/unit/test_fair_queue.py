"""Whose turn it is, and who is refused: tables, and a simulation with hypothesis."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_service.web.fair_queue import (
    AGAIN_SECONDS,
    LONGEST_PAUSE_SECONDS,
    SHARED_SECONDS,
    CallClass,
    FairQueue,
    Limit,
    Limits,
    Refusal,
)

PROMISED, RESTORE, NEGOTIATE, BEGIN, OTHER = CallClass
WIDE = Limits(at_once=4, project_requests=1000, requests=1000)


@dataclass(eq=False)
class Call:
    project: str
    kind: CallClass


class Calls:
    """A queue, and what is worked on."""

    def __init__(self, limits: Limits = WIDE) -> None:
        self.queue: FairQueue[Call] = FairQueue(limits)
        self.held: list[Call] = []
        self.now = 0.0

    def come(self, project: str, *kinds: CallClass, is_known: bool = True, of_several: bool = False) -> list[Call]:
        calls = [Call(project, kind) for kind in kinds]
        for call in calls:
            refusal = self.queue.let_in(project, call.kind, self.now, is_known=is_known, of_several=of_several)
            assert refusal is None
            self.queue.wait(project, call.kind, call)
        return calls

    def deal(self) -> list[Call]:
        dealt = list(iter(lambda: self.queue.take(self.now), None))
        self.held += dealt
        return dealt

    def end(self, call: Call) -> None:
        self.held.remove(call)
        self.queue.give_back(call.project, call.kind, 0.01, self.now)
        self.queue.leave(call.project)

    def in_order(self) -> list[Call]:
        """One after the other, in the order of their turns."""
        order = []
        while dealt := self.deal():
            for call in dealt:
                self.end(call)
            order += dealt
        return order


def one_at_a_time() -> Calls:
    return Calls(Limits(at_once=1, project_requests=1000, requests=1000))


def test_a_projects_seals_go_first_and_its_listings_last() -> None:
    calls = one_at_a_time()
    calls.come("a", OTHER, BEGIN, NEGOTIATE, RESTORE, PROMISED)
    assert [call.kind for call in calls.in_order()] == [PROMISED, RESTORE, NEGOTIATE, BEGIN, OTHER]


def test_within_a_class_it_is_the_order_in_which_they_came() -> None:
    calls = one_at_a_time()
    came = calls.come("a", *[BEGIN] * 5)
    assert calls.in_order() == came


def test_projects_take_turns_however_many_calls_one_has() -> None:
    calls = one_at_a_time()
    calls.come("storm", *[PROMISED] * 100)
    calls.come("quiet", *[OTHER] * 3)
    first = [call.project for call in calls.in_order()][:6]
    assert first == ["storm", "quiet"] * 3


def test_one_project_never_has_every_place() -> None:
    calls = Calls()
    calls.come("storm", *[PROMISED] * 100)
    assert len(calls.deal()) == WIDE.at_once - 1
    calls.come("quiet", RESTORE)
    assert [call.project for call in calls.deal()] == ["quiet"]


def held_by(calls: Calls, project: str) -> int:
    return sum(call.project == project for call in calls.held)


def end_and_deal(calls: Calls, count: int) -> None:
    for call in [call for call in calls.held if call.project == "storm"][:count]:
        calls.end(call)
        calls.deal()


def test_a_storm_has_an_eighth_of_the_places_while_another_project_trains() -> None:
    calls = Calls(Limits(at_once=8, project_requests=1000, requests=1000))
    calls.come("storm", *[PROMISED] * 100)
    calls.deal()
    assert held_by(calls, "storm") == 7, "nobody else has called"
    (quiet,) = calls.come("quiet", RESTORE)
    assert calls.deal() == [quiet]
    calls.end(quiet)
    end_and_deal(calls, 7)
    assert held_by(calls, "storm") == 1, "the quiet one's next call is worked on beside one other"
    calls.now += SHARED_SECONDS
    end_and_deal(calls, 1)
    assert held_by(calls, "storm") == 1, "its job lives"
    calls.now += 0.1
    end_and_deal(calls, 1)
    assert held_by(calls, "storm") == 7, "it has not called for a minute"


def test_a_storm_has_its_places_beside_another_project_if_no_call_waits_for_the_interpreter() -> None:
    calls = Calls(Limits(at_once=8, project_requests=1000, requests=1000))
    calls.come("quiet", RESTORE)
    calls.deal()
    calls.queue.is_crowded = False
    calls.come("storm", *[PROMISED] * 100)
    calls.deal()
    assert held_by(calls, "storm") == 7


def test_a_token_for_many_projects_is_not_held_to_the_share_of_one() -> None:
    calls = Calls(Limits(at_once=8, project_requests=1000, requests=1000))
    calls.come("a project", PROMISED)
    calls.come("(no project) token", *[RESTORE] * 100, is_known=False, of_several=True)
    calls.deal()
    assert held_by(calls, "(no project) token") == 7


def test_a_projects_training_does_not_wait_for_its_own_lists() -> None:
    calls = Calls(Limits(at_once=8, project_requests=1000, requests=1000))
    calls.come("quiet", RESTORE)
    calls.deal()
    calls.come("storm", OTHER, OTHER)
    assert [call.kind for call in calls.deal()] == [OTHER], "lists have the share of the project too"
    calls.come("storm", PROMISED, PROMISED)
    assert [call.kind for call in calls.deal()] == [PROMISED]


def test_those_who_wait_beside_free_places_are_looked_at_again() -> None:
    calls = Calls(Limits(at_once=8, project_requests=1000, requests=1000))
    calls.come("quiet", RESTORE)
    calls.come("storm", PROMISED, PROMISED)
    calls.deal()
    assert calls.queue.again_at(5.0) == 5.0 + AGAIN_SECONDS
    calls.queue.is_crowded = False
    calls.deal()
    assert calls.queue.again_at(5.0) is None, "nobody waits"
    for project in "abcdefgh":
        calls.come(project, BEGIN)
    calls.deal()
    assert calls.queue.again_at(5.0) is None, "there is no place until a call ends"


def test_slow_calls_of_one_project_refuse_none_of_another() -> None:
    calls = Calls()
    calls.come("storm", *[PROMISED] * 4)
    calls.come("quiet", *[BEGIN] * 4)
    calls.deal()
    for call in [call for call in calls.held if call.project == "storm"]:
        calls.held.remove(call)
        calls.queue.give_back("storm", PROMISED, 1000.0, 0.0)
    calls.come("quiet", *[BEGIN] * 20)


def test_projects_that_train_together_use_all_places() -> None:
    calls = Calls(Limits(at_once=8, project_requests=1000, requests=1000))
    for project in "abcdefgh":
        calls.come(project, *[BEGIN] * 10)
    calls.deal()
    assert [held_by(calls, project) for project in "abcdefgh"] == [1] * 8


@pytest.mark.parametrize(("kind", "is_known"), [(OTHER, True), (RESTORE, False)], ids=["listings", "strangers"])
def test_neither_listings_nor_strangers_take_places_from_training(kind: CallClass, is_known: bool) -> None:
    calls = Calls(Limits(at_once=8, project_requests=1000, requests=1000))
    calls.come("others", kind, is_known=is_known)
    calls.come("storm", *[PROMISED] * 100)
    calls.deal()
    assert (held_by(calls, "others"), held_by(calls, "storm")) == (1, 7)


def test_one_who_lists_without_end_has_a_fifth_of_the_time_of_its_places_beside_anothers_training() -> None:
    calls = Calls(Limits(at_once=8, project_requests=1000, requests=1000))
    (save,) = calls.come("saves", BEGIN)
    calls.come("greedy", *[OTHER] * 200)
    calls.deal()
    listed = 0
    while calls.now < 1.0:
        calls.now += 0.01
        for call in [call for call in calls.held if call.kind is OTHER]:
            calls.end(call)  # it has taken 0.01 s
            listed += 1
        calls.deal()
    assert listed == pytest.approx(20, abs=4), "of a hundred that one place could have done"
    ends_at = calls.queue.again_at(calls.now)
    assert ends_at is not None
    assert calls.now - 0.05 < ends_at <= calls.now + 0.05
    calls.come("looks", OTHER)
    calls.deal()
    assert held_by(calls, "looks") == 1, "another project's listing waits for none of these"
    calls.end(save)
    calls.now += 0.05
    calls.deal()
    for _ in range(5):
        calls.end(next(call for call in calls.held if call.project == "greedy"))
        assert calls.deal(), "no training is worked on, and it waits for none"


def test_a_call_that_waits_for_a_store_takes_no_place_from_its_project() -> None:
    calls = Calls(Limits(at_once=8, project_requests=1000, requests=1000))
    calls.come("quiet", RESTORE)
    calls.come("storm", *[PROMISED] * 100)
    calls.deal()
    assert held_by(calls, "storm") == 1
    for others in range(1, 7):
        calls.queue.goes_away("storm", PROMISED)
        calls.deal()
        assert held_by(calls, "storm") == 1 + others
    calls.queue.goes_away("storm", PROMISED)
    calls.deal()
    assert len(calls.held) == 8, "there are as many places as before"
    for _ in range(7):
        calls.queue.comes_back("storm", PROMISED)
    end_and_deal(calls, 1)
    assert held_by(calls, "storm") == 6, "those that came back go on, and none begins"


def test_listings_of_all_projects_have_half_of_the_places() -> None:
    calls = Calls()
    for project in "abcd":
        calls.come(project, OTHER)
    assert len(calls.deal()) == WIDE.at_once // 2
    calls.come("a", RESTORE, RESTORE)
    assert [call.kind for call in calls.deal()] == [RESTORE, RESTORE]


def test_no_class_of_a_project_starves() -> None:
    calls = one_at_a_time()
    calls.come("a", NEGOTIATE, BEGIN, OTHER)
    turns: list[CallClass] = []
    for _ in range(60):
        calls.come("a", PROMISED)
        calls.come("a", RESTORE)
        (dealt,) = calls.deal()
        turns.append(dealt.kind)
        calls.end(dealt)
    assert {NEGOTIATE, BEGIN, OTHER} <= set(turns)
    assert Counter(turns)[PROMISED] > 40


@pytest.mark.parametrize(
    ("kind", "most"), [(OTHER, 4), (BEGIN, 4), (NEGOTIATE, 6), (RESTORE, 8), (PROMISED, 50)], ids=lambda each: str(each)
)
def test_what_is_shed_first(kind: CallClass, most: int) -> None:
    """Of a limit of eight; seals and heartbeats are never refused."""
    queue: FairQueue[Call] = FairQueue(Limits(at_once=2, project_requests=8, requests=1000))
    let_in = 0
    while let_in < 50 and queue.let_in("a", kind, 0.0) is None:
        let_in += 1
    assert let_in == most
    assert queue.let_in("b", kind, 0.0) is None, "another project's limit is its own"
    assert queue.let_in("a", PROMISED, 0.0) is None


def test_a_call_that_would_wait_longer_than_its_client_is_told_when_to_come_again() -> None:
    """A call takes 0.4 s here, and one of two places is another project's: fifty take 20 s."""
    calls = Calls(Limits(at_once=2, project_requests=1000, requests=1000))
    slow = calls.come("storm", *[PROMISED] * 200)
    calls.deal()
    for call in slow[:150]:
        calls.held.remove(call)
        calls.queue.give_back("storm", PROMISED, 0.4, 0.0)
        calls.queue.leave("storm")
        calls.deal()
    refused = {kind: calls.queue.let_in("storm", kind, 0.0) for kind in (BEGIN, NEGOTIATE, RESTORE)}
    assert [kind for kind, refusal in refused.items() if refusal is not None] == [BEGIN, NEGOTIATE]
    assert all(
        each is None or (each.limit is Limit.WAIT and each.retry_after_seconds >= 20) for each in refused.values()
    )
    assert calls.queue.let_in("storm", PROMISED, 0.0) is None
    assert calls.queue.let_in("quiet", BEGIN, 0.0) is None, "it waits for its own turns alone"


def test_a_call_that_would_wait_longer_because_another_project_trains_is_told_too() -> None:
    """A call takes 0.4 s, and one is worked on at a time."""
    calls = Calls(Limits(at_once=8, project_requests=1000, requests=1000))
    calls.come("quiet", RESTORE)
    calls.come("storm", *[PROMISED] * 30)
    calls.queue._projects["storm"].call_seconds = 0.4
    assert calls.queue.let_in("storm", BEGIN, 0.0) is not None, "its thirty calls take 12 s"
    assert calls.queue.let_in("storm", RESTORE, 0.0) is None


def test_long_polls_make_nobody_wait() -> None:
    queue: FairQueue[Call] = FairQueue(Limits(at_once=2, project_requests=10_000, requests=100_000))
    for _ in range(4000):
        assert queue.let_in("a", RESTORE, 0.0) is None, "they have had their turn, and wait for an outcome"
    assert queue.let_in("a", BEGIN, 0.0) is None


def test_a_project_within_its_share_is_not_refused_for_the_others() -> None:
    queue: FairQueue[Call] = FairQueue(Limits(at_once=2, project_requests=1000, requests=10))
    for _ in range(4):
        assert queue.let_in("quiet", RESTORE, 0.0) is None
    for _ in range(6):
        assert queue.let_in("storm", RESTORE, 0.0) is None
    assert queue.let_in("storm", RESTORE, 0.0) == Refusal(Limit.SERVICE, 1)
    assert queue.let_in("quiet", RESTORE, 0.0) is None
    assert queue.let_in("new", BEGIN, 0.0) is None
    assert queue.let_in("storm", PROMISED, 0.0) is None


def test_those_who_are_refused_come_again_one_by_one() -> None:
    queue: FairQueue[Call] = FairQueue(Limits(at_once=2, project_requests=100, requests=1000))
    for _ in range(50):
        queue.let_in("a", BEGIN, 0.0)
    told = [queue.let_in("a", BEGIN, 0.0) for _ in range(1000)]
    seconds = [each.retry_after_seconds for each in told if each is not None]
    assert len(seconds) == 1000
    assert seconds == sorted(seconds)
    assert (seconds[0], seconds[-1]) == (2, 21), "50 calls of 20 ms are under way, and a thousand come again"
    for _ in range(10_000):
        longest = queue.let_in("a", BEGIN, 0.0)
    assert longest == Refusal(Limit.PROJECT, 30)


def test_it_knows_whether_training_waits() -> None:
    calls = one_at_a_time()
    calls.come("a", OTHER, OTHER)
    calls.deal()
    assert not calls.queue.training_waits
    calls.come("a", BEGIN)
    assert calls.queue.training_waits


STEPS = st.lists(
    st.tuples(st.sampled_from(["come", "end", "go away"]), st.sampled_from("abc"), st.sampled_from(CallClass)),
    max_size=200,
)


@given(STEPS, st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_whatever_happens_places_are_bounded_used_and_given_back(
    steps: list[tuple[str, str, CallClass]], at_once: int
) -> None:
    limits = Limits(at_once=at_once, project_requests=20, requests=40)
    calls, waiting = Calls(limits), list[Call]()
    for what, project, kind in steps:
        if what == "come":
            if calls.queue.let_in(project, kind, 0.0) is None:
                waiting.append(Call(project, kind))
                calls.queue.wait(project, kind, waiting[-1])
        elif what == "end" and calls.held:
            calls.end(calls.held[0])
        elif what == "go away" and waiting:
            gone = waiting.pop()
            calls.queue.stop_waiting(gone.project, gone.kind, gone)
            calls.queue.leave(gone.project)
        for call in calls.deal():
            waiting.remove(call)
        assert len(calls.held) == calls.queue.held <= at_once
        by_project = Counter(call.project for call in calls.held)
        assert all(count <= limits.project_at_once for count in by_project.values())
        idle = at_once - len(calls.held)
        for call in waiting if idle else ():
            if by_project[call.project] >= limits.project_at_once:
                continue
            if call.kind is OTHER:
                blocked = not calls.queue.may_list(call.project, calls.now)
            else:
                training = sum(each.project == call.project and each.kind is not OTHER for each in calls.held)
                blocked = training >= calls.queue.most_of(call.project)
            assert blocked, "a place is free for it"
    for _ in range(len(waiting) + len(calls.held) + 1):
        calls.now += LONGEST_PAUSE_SECONDS
        for call in calls.held[:1]:
            calls.end(call)
        for call in calls.deal():
            waiting.remove(call)
    assert not waiting
    assert calls.queue.let_in_count == calls.queue.held == 0
    assert not calls.queue._projects
    assert not calls.queue._waiting


@given(st.integers(1, 300), st.sampled_from(CallClass))
@settings(max_examples=50, deadline=None)
def test_another_projects_call_waits_for_one_call_at_most(storm: int, kind: CallClass) -> None:
    calls = Calls()
    calls.come("storm", *[PROMISED] * storm)
    calls.deal()
    (late,) = calls.come("quiet", kind)
    if late not in calls.deal():
        calls.end(calls.held[0])
        assert late in calls.deal()

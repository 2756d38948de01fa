"""A repairer that is killed between any two of its steps is followed by another (rule row-before-copy)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import holdfast_service.collect.controller
import holdfast_service.copies.copy_chunk
import holdfast_service.scrub.repair
from holdfast_protocol.states import CopyState, Proof
from holdfast_service.scrub import controller as rescrub
from holdfast_service.scrub import repair
from tests.service.conftest import Clock
from tests.support.death import Killed
from tests.support.rank import Job
from tests.support.repairing import CONTENT, DAY, actions, health_of
from tests.support.rot import copies_of, copy_to_second, flip, key_of, stored
from tests.support.service import RunningService

STEPS: dict[str, tuple[ModuleType, str]] = {
    "the bad copy was claimed": (holdfast_service.scrub.repair, "claim_damaged"),
    "a new copy was begun": (holdfast_service.scrub.repair, "_begin"),
    "its bytes were written": (holdfast_service.copies.copy_chunk, "move_bytes"),
    "it was settled": (holdfast_service.scrub.repair, "copy_now"),
    "it was claimed to be read": (holdfast_service.scrub.repair, "_claim_another"),
    "it was read": (holdfast_service.scrub.repair, "_read"),
    "the bad copy was settled": (holdfast_service.scrub.repair, "_settle_repaired"),
}


def kill_after(monkeypatch: pytest.MonkeyPatch, service: RunningService, module: ModuleType, name: str) -> None:
    """A process that ends when this function has done its work. Where that is a transaction's, it is committed."""
    real: Callable[..., Any] = getattr(module, name)
    run = service.context.database.run

    def then_dies(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if name == "_read" or result not in (None, False):  # reading gives nothing: its end is the step
            raise Killed
        return result

    def commits_and_dies(work: Callable[[Any], Any], **kwargs: Any) -> Any:
        died = False

        def noting(session: Any) -> Any:
            nonlocal died
            try:
                return work(session)
            except Killed:
                died = True
                return None

        result = run(noting, **kwargs)
        if died:
            raise Killed
        return result

    monkeypatch.setattr(module, name, then_dies)
    monkeypatch.setattr(holdfast_service.scrub.repair, "claim_damaged", holdfast_service.scrub.repair.claim_damaged)
    monkeypatch.setattr(service.context.database, "run", commits_and_dies)
    # What a killed process cannot do either.
    monkeypatch.setattr(holdfast_service.copies.copy_chunk, "give_up_copy", lambda *_: None)


@pytest.mark.rule("row-before-copy")
def test_a_repairer_that_is_killed_after_any_step_is_followed_by_another(
    service: RunningService, job: Job, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (step, (module, name)) in enumerate(STEPS.items(), start=1):
        content = step.encode()
        saved = job.save(number, content=content)
        copy_to_second(service)
        flip(service.context.store, key_of(service, content))
        clock.advance(31 * DAY)
        assert rescrub.reconcile(service.context).bad == 1
        with monkeypatch.context() as broken:
            kill_after(broken, service, module, name)
            with pytest.raises(Killed):
                repair.reconcile(service.context)
        clock.advance(15 * 60)
        repair.reconcile(service.context)
        assert actions(service) == ["copy.repair"] * number, step
        good = [copy for copy in copies_of(service, content) if copy.state == CopyState.VERIFIED]
        assert [copy.proof for copy in good] == [Proof.READ], step
        assert stored(service.context.store, key_of(service, content)) == content
        assert health_of(service, saved["id"]) == ("ok", None)
    clock.let_tickets_expire(service.context.settings)
    holdfast_service.collect.controller.reconcile(service.context)
    listed = [each.key.digest for each in service.context.store.list_objects(good[0].project_id)]
    assert len(listed) == len(set(listed)) == 2 * len(STEPS), "nothing is left behind"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("step", ["read_one", "repair_if_whole"])
def test_a_repairer_that_is_killed_before_a_mark_is_gone_is_followed_by_another(
    service: RunningService, job: Job, lost: dict[str, Any], clock: Clock, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    assert job.save(200, content=CONTENT)["state"] == "committed"
    with monkeypatch.context() as broken:
        broken.setattr(repair, "_repair_what_is_due", lambda *_: None)  # its own steps are killed above
        kill_after(broken, service, repair, step)
        with pytest.raises(Killed):
            repair.reconcile(service.context)
    clock.advance(15 * 60)
    repair.reconcile(service.context)
    assert health_of(service, lost["id"]) == ("ok", None)
    assert actions(service).count("checkpoint.repair") == 1

"""A catalog that gives a checkpoint another step or another run: what its ranks sealed is believed."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing

import pytest
import torch

import holdfast
from holdfast import errors
from holdfast.export.pull import Format, pull
from holdfast_protocol.runs import Latest, parse_run


@pytest.fixture
def saved(service, run):
    """Steps 0 and 20 of a run."""
    state = {"model": torch.nn.Linear(4, 4)}
    with holdfast.Checkpointer(run, create=True) as ckpt:
        ckpt.restore(state)
        for step in (0, 20):
            with torch.no_grad():
                state["model"].weight.fill_(step)
            ckpt.save(step, state).committed.result(timeout=60)
    return run


def alter(service, statement, *values):
    with closing(sqlite3.connect(service.data / "catalog.db", timeout=60)) as database, database:
        assert database.execute(statement, values).rowcount == 1


def newest(service, run):
    return next(service.client.checkpoints.all(*run.split("/"))).id


@pytest.mark.rule("index-names-its-save")
def test_a_step_that_was_changed_in_the_catalog_is_refused_and_the_one_before_taken(service, saved, caplog, tmp_path):
    alter(service, "UPDATE checkpoints SET step = 28 WHERE id = ?", newest(service, saved))
    state = {"model": torch.nn.Linear(4, 4)}
    with caplog.at_level(logging.WARNING, logger="holdfast"), holdfast.Checkpointer(saved) as ckpt:
        assert ckpt.restore(state) == 1, "step 20 is not step 28, and step 0 is what it says"
    assert state["model"].weight.unique().tolist() == [0.0]
    assert f"step 28 of {saved} cannot be restored, taking step 0 instead" in caplog.text
    assert f"is rank 0 of step 20 of {saved}" in caplog.text
    before = state["model"].weight.tolist()
    with pytest.raises(errors.IntegrityError, match="step 20"):
        holdfast.load_weights(f"{saved}@28", state["model"])
    assert state["model"].weight.tolist() == before
    with pytest.raises(errors.IntegrityError, match="step 20"):
        pull(service.client, parse_run(saved), Latest(), tmp_path / "pulled", Format.TORCH)
    assert not (tmp_path / "pulled").exists()


@pytest.mark.rule("index-names-its-save")
def test_a_checkpoint_that_the_catalog_moved_to_another_run_is_not_restored_there(service, saved):
    other = f"{saved}-other"
    with holdfast.Checkpointer(other, create=True) as ckpt:
        ckpt.restore({"model": torch.nn.Linear(4, 4)})
        ckpt.save(0, {"model": torch.nn.Linear(4, 4)}).committed.result(timeout=60)
    alter(
        service,
        "UPDATE checkpoints SET (run_id, attempt_id) = (SELECT run_id, attempt_id FROM checkpoints WHERE id = ?)"
        " WHERE id = ?",
        newest(service, other),
        newest(service, saved),
    )
    with holdfast.Checkpointer(other) as ckpt:
        assert ckpt.restore({"model": torch.nn.Linear(4, 4)}) == 1, "its own step 0, and not the other run's step 20"


@pytest.mark.rule("index-names-its-save")
def test_another_world_size_in_the_catalog_is_refused(service, saved):
    alter(service, "UPDATE checkpoints SET world_size = 2 WHERE id = ?", newest(service, saved))
    with holdfast.Checkpointer(saved) as ckpt:
        assert ckpt.restore({"model": torch.nn.Linear(4, 4)}) == 1

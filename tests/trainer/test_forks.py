"""A job in a forked run goes on, bit for bit, from the checkpoint of the run that was forked."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing

import pytest
import torch
from gloo import run_ranks
from tests.support.training import train
from torch import nn

import holdfast
from holdfast import errors
from holdfast.export.pull import Format, pull
from holdfast_client.comparison import compare
from holdfast_client.errors import CheckpointUnproven
from holdfast_protocol.runs import Latest, parse_run
from holdfast_protocol.states import OperationState, StoreRole


def forked(service, run, selector="latest"):
    """The name of a fork of the run. The service first reads what the job has written into the mounted store."""
    name, deadline = f"{run.partition('/')[2]}-fork", time.monotonic() + 120
    while True:
        try:
            made = service.client.runs.fork(parse_run(run), name, selector)
        except CheckpointUnproven:
            assert time.monotonic() < deadline, "it was never read"
            time.sleep(0.05)
        else:
            return f"{made.project}/{made.name}"


def newest(service, run):
    return next(service.client.checkpoints.all(*run.split("/")))


@pytest.mark.rule("bit-exact-resume")
def test_a_fork_goes_on_bit_for_bit_as_its_source_would_have(service, run):
    whole = train(0, None, 9)
    first = train(0, run, 5, every=2)
    fork = forked(service, run, "3")
    again = f"{fork}-again"
    service.client.runs.fork(parse_run(fork), again.partition("/")[2])
    second = train(0, fork, 9, every=2, seed=7)
    assert second.start == 4, "step 3 is the newest that is saved"
    assert {**first.losses, **second.losses} == whole.losses
    assert (second.final, second.rng) == (whole.final, whole.rng)
    third = train(0, again, 9, every=2, seed=8)
    assert (third.start, third.final, third.rng) == (4, whole.final, whole.rng), "so does the fork of a fork"
    assert newest(service, run).step == 3, "its source stands where it stood"
    assert newest(service, fork).forked_from is None, "what its own job has saved is its own"


def launch(rank, run, until, kind, loader, seed=0):
    return train(rank, run, until, every=2, kind=kind, loader=loader, seed=seed)


@pytest.mark.rule("bit-exact-resume")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_each_rank_of_a_job_goes_on_bit_for_bit_from_a_fork(service, run, kind):
    whole = run_ranks(launch, 2, None, 7, kind, True)
    run_ranks(launch, 2, run, 5, kind, True)
    fork = forked(service, run, "3")
    for again, straight in zip(run_ranks(launch, 2, fork, 7, kind, True, 7), whole, strict=True):
        assert (again.start, again.final, again.rng) == (4, straight.final, straight.rng)
        assert again.losses == {step: straight.losses[step] for step in (4, 5, 6)}


def test_a_fork_comes_to_another_number_of_ranks(service, run):
    saved = run_ranks(launch, 2, run, 4, "fsdp", False)[0].final
    fork = forked(service, run, "3")
    for ranks in (3, 1):
        again = run_ranks(launch, ranks, fork, 4, "fsdp", False, 7)
        assert [(each.start, each.restored) for each in again] == [(4, saved)] * ranks


@pytest.mark.rule("index-names-its-save")
def test_a_fork_is_read_as_any_checkpoint_and_only_as_what_its_ranks_have_sealed(service, run, tmp_path):
    state = {"model": nn.Linear(4, 4)}
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(state)
        ckpt.save(20, state).committed.result(timeout=60)
    fork = forked(service, run)
    source, made = newest(service, run), newest(service, fork)
    pull(service.client, parse_run(fork), Latest(), tmp_path / "out", Format.TORCH)
    pulled = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert torch.equal(pulled["weight"], state["model"].weight)
    loaded = nn.Linear(4, 4)
    holdfast.load_weights(f"{fork}@20", loaded)
    assert torch.equal(loaded.weight, state["model"].weight)
    found = compare(service.client, source.id, made.id)
    assert (found.tensors.equal, found.other_values) == (["model/bias", "model/weight"], [])
    drill = service.client.copies.drill(*fork.split("/"), store=StoreRole.PRIMARY)
    assert service.client.operations.wait(drill.id, timeout_seconds=120).state is OperationState.DONE

    def refused(forked_from):
        with closing(sqlite3.connect(service.data / "catalog.db", timeout=60)) as database, database:
            changed = database.execute("UPDATE checkpoints SET forked_from = ? WHERE id = ?", (forked_from, made.id))
            assert changed.rowcount == 1
        with pytest.raises(errors.IntegrityError, match=f"rank 0 of step 20 of {run}, saved by"):
            holdfast.load_weights(f"{fork}@20", loaded)

    refused(None)
    refused(made.forked_from.model_copy(update={"saved_in": "another"}).model_dump_json())


def test_weights_outlive_the_run_that_they_came_from(service, run):
    state = {"model": nn.Linear(4, 4)}
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(state)
        for step in (1, 2):
            ckpt.save(step, state).committed.result(timeout=60)
    fork = forked(service, run, "1")
    project, name = run.split("/")
    service.client.runs.delete(project, name, etag="*")
    restored = {"model": nn.Linear(4, 4)}
    with holdfast.Checkpointer(fork) as ckpt:
        assert ckpt.restore(restored) == 2
    assert torch.equal(restored["model"].weight, state["model"].weight)

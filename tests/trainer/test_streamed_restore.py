"""`restore(state, stream=True)`: a training that goes on from it is, bit for bit, one that goes on from restore(state).
No step is taken before the whole state was verified on all ranks. A damaged rest takes all of them back together."""

from __future__ import annotations

import copy
import logging
import os
import re
import signal
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from gloo import run_ranks
from roundtrip import save
from tests.support.damage import chunks_of, files_of, flip
from tests.support.late_rest import late_rest
from tests.support.training import Job, random_numbers, train, values
from torch import nn

import holdfast
from holdfast import errors
from holdfast.layout.plan import global_layout
from holdfast.restore.checkpoint_reader import CheckpointSource
from holdfast.state.components import state_may_come_late
from holdfast.state.load import LoadOptions, StoredState, plan_load
from holdfast.state.pending_slots import PendingState
from holdfast_client.client import Client
from holdfast_protocol.index_documents import Layout, ShardIndex

SAVED = 3
UNTIL = 6


@pytest.fixture(autouse=True)
def _saves_are_proven(monkeypatch):
    """Files handed over through the mount would be read again in the background, which may find a damage first."""
    monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")


def resumed(rank, run, *, stream, kind="plain", optimizer="adamw", **options):
    """What a launch does from the restore on, and whether the state of its optimizer was still to come."""
    job = Job(rank, kind, optimizer, seed=7)
    with late_rest() as late, holdfast.Checkpointer(run, strict=True, **options) as ckpt:
        start = ckpt.restore(job.state, stream=stream)
        groups = [{**group, "params": None} for group in job.state["optimizer"].param_groups]
        is_pending = type(job.state["optimizer"].state) is PendingState
        assert late.waited == 0
        losses = {step: job.step(step) for step in range(start, UNTIL)}
        assert (len(late.begun), late.waited) == (is_pending, is_pending)
        assert (ckpt.wait_for_rest() > 0) is is_pending
        assert type(job.state["optimizer"].state) is defaultdict
        return is_pending, (start, groups, losses, values(job.state), random_numbers())


def all_ways(rank, run, kind):
    """The launch that never stopped, and two that go on from its checkpoint: streamed, and not."""
    whole = train(rank, None, UNTIL, kind=kind)
    train(rank, run, SAVED, kind=kind)
    return whole, *(resumed(rank, run, stream=stream, kind=kind) for stream in (True, False))


def check(whole, streamed, ordinary, is_late):
    assert (streamed[0], ordinary[0]) == (is_late, False)
    assert streamed[1] == ordinary[1]
    start, _, losses, final, rng = streamed[1]
    assert (start, losses) == (SAVED, {step: whole.losses[step] for step in range(SAVED, UNTIL)})
    assert (final, rng) == (whole.final, whole.rng)


@pytest.mark.rule("streamed-restore-waits")
@pytest.mark.parametrize(("optimizer", "options"), [("adamw", {}), ("momentum", {"overlap": True}), ("sgd", {})])
def test_training_goes_on_bit_for_bit_as_after_an_ordinary_restore(run, optimizer, options):
    whole = train(0, None, UNTIL, optimizer=optimizer)
    train(0, run, SAVED, optimizer=optimizer)
    streamed = resumed(0, run, stream=True, optimizer=optimizer, **options)
    ordinary = resumed(0, run, stream=False, optimizer=optimizer)
    check(whole, streamed, ordinary, is_late=optimizer != "sgd")


@pytest.mark.rule("streamed-restore-waits")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_same_on_two_ranks(run, kind):
    for each in run_ranks(all_ways, 2, run, kind):
        check(*each, is_late=True)


def test_from_the_local_tier_of_the_node(run, tmp_path):
    job = Job()
    with holdfast.Checkpointer(run, local=tmp_path / "nvme", strict=True) as ckpt:
        ckpt.restore(job.state)
        for step in range(SAVED):
            job.step(step)
        ckpt.save(SAVED - 1, job.state).committed.result(timeout=60)
    streamed, ordinary = (
        resumed(0, run, stream=stream, local=tmp_path / "nvme" if stream else None) for stream in (True, False)
    )
    check(train(0, None, UNTIL), streamed, ordinary, is_late=True)


def trained_sharded(rank, run):
    job = Job(rank, "fsdp", loader=False)
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state)
        for step in range(SAVED):
            job.step(step)
        ckpt.save(SAVED - 1, job.state).committed.result(timeout=60)
    return values(job.state)


def test_a_checkpoint_of_two_ranks_comes_to_one(run):
    saved, _ = run_ranks(trained_sharded, 2, run)
    job = Job(loader=False, seed=7)
    with late_rest(), holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(job.state, stream=True) == SAVED
        assert type(job.state["optimizer"].state) is PendingState
        ckpt.wait_for_rest()
        assert values(job.state) == saved


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 5))

    def forward(self, x):
        return self.layers(x)


def scaled(run, options, *, stream):
    """Two batches a step, a scaler that leaves the first one out, and an average of the weights."""
    torch.manual_seed(0)
    model = Normed()
    state = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01, **options),
        "scaler": torch.amp.GradScaler("cpu", init_scale=4.0),
        "average": torch.optim.swa_utils.AveragedModel(model),
    }
    torch.manual_seed(1)
    with late_rest() as late, holdfast.Checkpointer(run, strict=True) as ckpt:
        start = ckpt.restore(state, stream=stream)
        for step in range(start, start + 3):
            for _ in range(2):
                state["scaler"].scale(model(torch.randn(6, 5)).pow(2).mean()).backward()
            if step == 2:
                next(model.parameters()).grad.fill_(float("inf"))
            state["scaler"].step(state["optimizer"])
            # The fused kernel itself leaves the first step out; else the scaler does, and nothing waits.
            assert not stream or late.waited == (step > 2 or "fused" in options)
            state["scaler"].update()
            state["optimizer"].zero_grad()
            state["average"].update_parameters(model)
        if not start:
            ckpt.save(1, state).committed.result(timeout=60)
    slots = [slot for each in state["optimizer"].state.values() for slot in each.values()]
    tensors = [*model.state_dict().values(), *state["average"].state_dict().values(), *slots]
    return [each.detach().numpy().tobytes() for each in tensors], state["scaler"].state_dict()


@pytest.mark.rule("streamed-restore-waits")
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_accumulated_gradients_a_scaler_and_averages(run, options):
    scaled(run, options, stream=False)
    assert scaled(run, options, stream=True) == scaled(run, options, stream=False)


def resumed_from(service, run):
    """The step that the newest attempt has resumed from, as the service knows it."""
    newest = max(service.client.attempts.all(*run.split("/")), key=lambda attempt: attempt.number)
    return newest.resumed_from and service.client.checkpoints.get(newest.resumed_from).step


def damage_the_rest(client, store, run, *, step=SAVED - 1, slot="optimizer/model/up.weight/exp_avg"):
    [newest] = [each for each in client.checkpoints.all(*run.split("/")) if each.step == step]
    for _, digest in chunks_of(client, newest.id, slot):
        for path in files_of(store, digest):
            flip(path)


def train_and_damage(rank, run, store, kind="plain"):
    """Returns the launch that never stopped."""
    train(rank, run, SAVED, kind=kind)
    if rank == 0:
        with Client() as client:
            damage_the_rest(client, store, run)
    return train(rank, None, UNTIL, kind=kind)


def faulty(rank, run, store):
    """The loop of the how-to, over a checkpoint whose optimizer is damaged."""
    whole = train_and_damage(rank, run, store, "ddp")
    job, starts, faults, stepped = Job(rank, "ddp", seed=7), [], [], []
    with late_rest() as late, holdfast.Checkpointer(run, strict=True) as ckpt:
        while True:
            starts.append(ckpt.restore(job.state, stream=True))
            before = values({**job.state, "optimizer": torch.optim.SGD(job.state["model"].parameters())})
            try:
                losses = {step: job.step(step) for step in range(starts[-1], UNTIL)}
                break
            except errors.RestoreFault as fault:
                faults.append((fault.step, isinstance(fault.__cause__, errors.IntegrityError)))
            after = values({**job.state, "optimizer": torch.optim.SGD(job.state["model"].parameters())})
            stepped.append({name for name in before if before[name] != after[name]} - {"dataloader", "notes"})
            assert all(each.grad is None for each in job.state["model"].parameters())
            for use in (job.state["optimizer"].step, lambda: job.state["optimizer"].state[None]):
                with pytest.raises(errors.RestoreFault, match=r"rest of step 2 .* cannot be restored"):
                    use()
            with pytest.raises(errors.RestoreFault, match=r"Call restore\(state\) again on every rank"):
                ckpt.save(9, job.state)
        assert late.waited == 2
        ckpt.save(UNTIL - 1, job.state).committed.result(timeout=60)
    return whole, starts, faults, stepped, losses, values(job.state)


@pytest.mark.rule("streamed-restore-waits")
def test_a_damaged_rest_takes_all_ranks_back_to_the_point_before(run, service):
    for whole, starts, faults, stepped, losses, final in run_ranks(faulty, 2, run, service.store):
        assert (starts, faults, stepped) == ([SAVED, SAVED - 1], [(SAVED - 1, True)], [set()])
        assert losses == {step: whole.losses[step] for step in range(SAVED - 1, UNTIL)}
        assert final == whole.final
    assert next(iter(service.client.checkpoints.all(*run.split("/")))).step == UNTIL - 1
    assert resumed_from(service, run) == SAVED - 2


@pytest.mark.rule("streamed-restore-waits")
def test_damage_that_the_service_does_not_know_of_takes_the_ranks_back_too(run, monkeypatch):
    def read(*_, **__):
        raise errors.IntegrityError("The rest is not as its layout says")

    train(0, run, SAVED)
    job = Job(seed=7)
    with late_rest(), holdfast.Checkpointer(run, strict=True) as ckpt:
        assert ckpt.restore(job.state, stream=True) == SAVED
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointSource, "read", read)
            with pytest.raises(errors.RestoreFault, match="not as its layout says"):
                job.step(SAVED)
        assert ckpt.restore(job.state, stream=True) == SAVED - 1
        for step in range(SAVED - 1, UNTIL):
            job.step(step)
    assert values(job.state) == train(0, None, UNTIL).final


def scaled_job():
    torch.manual_seed(0)
    model = nn.Linear(5, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "scaler": torch.amp.GradScaler("cpu", init_scale=4.0)}


def scaled_step(state, step):
    batch = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
    state["scaler"].scale(state["model"](batch).pow(2).mean()).backward()
    state["scaler"].step(state["optimizer"])
    state["scaler"].update()
    state["optimizer"].zero_grad()


@pytest.mark.rule("streamed-restore-waits")
def test_the_step_that_met_a_damaged_rest_leaves_nothing_behind(run, service):
    state = scaled_job()
    with holdfast.Checkpointer(run, strict=True) as ckpt:
        ckpt.restore(state)
        for step in range(2):
            scaled_step(state, step)
            ckpt.save(step, state).committed.result(timeout=60)
    damage_the_rest(service.client, service.store, run, step=1, slot="optimizer/model/weight/exp_avg")
    ends = []
    for stream in (True, False):
        state = scaled_job()
        with late_rest(), holdfast.Checkpointer(run, strict=True) as ckpt:
            start = ckpt.restore(state, stream=stream)
            if stream:
                with pytest.raises(errors.RestoreFault):
                    scaled_step(state, start)
                start = ckpt.restore(state, stream=True)
            scaled_step(state, start)
            ends.append((start, [each.tolist() for each in state["model"].parameters()], state["scaler"].state_dict()))
    assert ends[0] == ends[1]
    assert ends[0][0] == 1


def test_the_loop_of_the_quickstart(run, service):
    page = (Path(holdfast.__file__).parents[2] / "docs" / "quickstart.md").read_text(encoding="utf-8")
    [loop] = re.findall(
        r"test_streamed_restore.py runs this block as it stands -->\n```python\n(.*?)```", page, re.DOTALL
    )
    whole = train_and_damage(0, run, service.store)
    job, starts = Job(seed=7), []

    def trains(start):
        starts.append(start)
        for step in range(start, UNTIL):
            job.step(step)

    with late_rest(), holdfast.Checkpointer(run, strict=True) as ckpt:
        exec(loop, {"ckpt": ckpt, "state": job.state, "train": trains, "holdfast": holdfast})
    assert starts == [SAVED, SAVED - 1]
    assert values(job.state) == whole.final


def met_apart(rank, run, store):
    """Rank 1 comes to no step of an optimizer: its scaler leaves it out, say."""
    train_and_damage(rank, run, store)
    job = Job(rank, seed=7)
    with late_rest(), holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state, stream=True)
        with pytest.raises(errors.RestoreFault):
            job.step(SAVED) if rank == 0 else ckpt.step(SAVED, job.state)
        return ckpt.restore(job.state, stream=True)


@pytest.mark.rule("streamed-restore-waits")
def test_ranks_hear_of_a_damaged_rest_wherever_they_are(run, service):
    assert run_ranks(met_apart, 2, run, service.store) == [SAVED - 1] * 2


def test_a_damaged_rest_of_a_named_point_raises_and_takes_no_other(run, service):
    train_and_damage(0, run, service.store)
    job = Job()
    with late_rest(), holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state, at=str(SAVED - 1), stream=True)
        for _ in range(2):
            with pytest.raises(errors.ChunkLost) as raised:
                job.step(SAVED)
        assert "do not train on it" in "".join(raised.value.__notes__)
        assert ckpt.restore(job.state) == SAVED - 1


def test_the_service_hears_of_the_restore_when_all_of_it_is_there(run, service):
    train(0, run, SAVED)
    job = Job()

    with late_rest() as late, holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state, stream=True)
        assert resumed_from(service, run) is None
        late.let_go()
        assert resumed_from(service, run) == SAVED - 1
        job.step(SAVED)
        assert (late.waited, ckpt.wait_for_rest()) == (0, 0.0)


@pytest.mark.rule("streamed-restore-waits")
def test_a_service_that_is_killed_before_the_rest_lets_no_step_be_taken(own_service):
    own_service.client.runs.create(own_service.project.name, "run")
    run = f"{own_service.project.name}/run"
    train(0, run, SAVED)
    job = Job(seed=7)
    with late_rest(), holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(job.state, stream=True) == SAVED
        restored = values({**job.state, "optimizer": torch.optim.SGD(job.state["model"].parameters())})
        own_service.served.process.kill9()
        for act in (lambda: job.step(SAVED), lambda: ckpt.save(SAVED, job.state), ckpt.wait_for_rest):
            with pytest.raises(errors.ServiceUnavailable) as raised:
                act()
        assert "do not train on it" in "".join(raised.value.__notes__)
        now = values({**job.state, "optimizer": torch.optim.SGD(job.state["model"].parameters())})
        assert {name for name in now if now[name] != restored[name]} == {"dataloader"}


def one_is_killed(rank, run, killed):
    train(rank, run, SAVED)
    job = Job(rank)
    with late_rest() as late, holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state, stream=True)
        ckpt.parts.ranks.gather(None)
        if rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        ckpt.parts.ranks.timeout_seconds = 1.0
        late.let_go()
        job.step(SAVED)


@pytest.mark.rule("streamed-restore-waits")
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_before_the_first_step_lets_no_other_step(run, killed):
    with pytest.raises(AssertionError) as failed:
        run_ranks(one_is_killed, 2, run, killed, peers_seconds=60)
    told = re.split(r"^rank \d: ", str(failed.value), flags=re.MULTILINE)[1:]
    assert "died with exit code -9" in told[killed]
    assert "errors.RankLost" in told[1 - killed]


def one_leaves(rank, run):
    train(rank, run, SAVED)
    job = Job(rank)
    with late_rest(), holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state, stream=True)
        if rank == 0:
            with pytest.raises(errors.RankLost, match=r"rank 1: This rank has ended"):
                job.step(SAVED)


def test_a_rank_that_leaves_before_the_first_step_lets_no_other_wait(run):
    run_ranks(one_leaves, 2, run)


@pytest.mark.rule("streamed-restore-waits")
def test_an_end_without_a_step_waits_for_nothing_and_leaves_no_optimizer_without_its_state(run):
    train(0, run, SAVED)
    job, other = Job(), torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with late_rest() as late, holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state, stream=True)
    assert late.waited == 0
    for use in (lambda: job.step(SAVED), job.state["optimizer"].state_dict):
        with pytest.raises(errors.ConfigurationError, match=r"closed before the rest of its restore was there"):
            use()
    other.step()
    with late_rest() as late, holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(job.state, stream=True) == SAVED
        late.let_go()
    losses = {step: job.step(step) for step in range(SAVED, UNTIL)}
    whole = train(0, None, UNTIL)
    assert losses == {step: whole.losses[step] for step in losses}, "it was there before the end"


@pytest.mark.rule("streamed-restore-waits")
def test_a_save_right_after_it_waits_and_is_whole(run):
    train(0, run, SAVED)
    job = Job(seed=7)
    with late_rest() as late, holdfast.Checkpointer(run, strict=True) as ckpt:
        start = ckpt.restore(job.state, stream=True)
        ckpt.save(start, job.state).committed.result(timeout=60)
        assert late.waited == 1
    again = Job(seed=8)
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(again.state) == start + 1
    assert values(again.state) == values(job.state)


def uses():
    def loads(optimizer):
        optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
        return 0

    def is_set(optimizer):
        optimizer.state = defaultdict(dict)
        return 0

    return {
        "state_dict": lambda optimizer: len(optimizer.state_dict()["state"]),
        "deepcopy": lambda optimizer: len(copy.deepcopy(optimizer.state)),
        "bool": lambda optimizer: optimizer.state and len(optimizer.state),
        "items": lambda optimizer: len(list(optimizer.state.items())),
        "get": lambda optimizer: optimizer.state.get(optimizer.param_groups[0]["params"][0]) and len(optimizer.state),
        "load_state_dict": loads,
        "set anew": is_set,
    }


@pytest.mark.rule("streamed-restore-waits")
def test_whatever_uses_the_state_of_an_optimizer_waits_for_it(run):
    train(0, run, SAVED)
    with late_rest(), holdfast.Checkpointer(run) as ckpt:
        for name, use in uses().items():
            ends = []
            for stream in (False, True):
                job = Job(seed=7)
                optimizer = job.state["optimizer"]
                ckpt.restore(job.state, stream=stream)
                kept = optimizer.state
                found = use(optimizer)
                job.step(SAVED)
                ends.append((found, values(job.state), len(kept), len(optimizer.state)))
            assert ends[0] == ends[1], name


class Inside(torch.optim.Optimizer):
    """An optimizer that reads the state of another one within it."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.state = inner, inner.state

    def step(self, closure=None):
        return self.inner.step(closure)


def late_slots(optimizer, *, keeps=0):
    """How many slots of a job's optimizer can be late, in all and beside `keeps` of them in a value of the state."""
    job = Job(loader=False)
    job.step(0)
    own = job.state["optimizer"]
    slots = [own.state[parameter]["exp_avg"] for parameter in own.param_groups[0]["params"] if parameter in own.state]
    state = {"model": job.state["model"], "optimizer": own, "kept": slots[:keeps]}
    part = save(state)
    state["optimizer"] = optimizer(own)
    layout, index = Layout.decode(global_layout([part.plan]).encode()), ShardIndex.decode(part.index)
    stored = StoredState(layout, index.replicated_trees, {0: index.trees})
    plan = plan_load(state, stored, rank=0, world_size=1, stream=True, options=LoadOptions(strict=False))
    assert plan.late_names == frozenset().union(*(slots.names for slots in plan.late))
    return len(plan.late_names), 3 * len(slots)


@pytest.mark.rule("streamed-restore-waits")
def test_what_comes_first_in_spite_of_streaming():
    def with_options(**options):
        return lambda own: torch.optim.AdamW(own.param_groups[0]["params"], lr=0.01, **options)

    late, whole = late_slots(lambda own: own)
    assert late == whole > 0
    assert late_slots(with_options()) == (whole, whole)
    assert late_slots(with_options(capturable=True)) == (0, whole), "a graph is replayed without a hook"
    stepped = torch.optim.SGD([nn.Parameter(torch.ones(2, device="meta"))], momentum=0.9)
    assert state_may_come_late(stepped, stepped.param_groups[0])
    stepped.param_groups[0]["params"][0].grad = torch.ones(2, device="meta")
    stepped.step()
    assert not state_may_come_late(stepped, stepped.param_groups[0]), "a graph may have captured that step"
    assert late_slots(Inside) == (0, whole), "nothing makes the inner one wait"
    assert late_slots(lambda own: own, keeps=2) == (whole - 2 * 3, whole), "a value of the state is the very slot"


def test_a_second_restore_gives_the_rest_of_the_first_up(run, caplog):
    whole = train(0, None, UNTIL)
    train(0, run, SAVED)
    job = Job(seed=7)
    with (
        caplog.at_level(logging.INFO, logger="holdfast"),
        late_rest() as late,
        holdfast.Checkpointer(run, strict=True) as ckpt,
    ):
        for _ in range(2):
            start = ckpt.restore(job.state, stream=True)
        assert {step: job.step(step) for step in range(start, UNTIL)} == {
            step: whole.losses[step] for step in range(SAVED, UNTIL)
        }
        assert [coming.error is None for coming in late.begun] == [False, True]
        job.step(UNTIL)
        assert ckpt.restore(job.state, stream=True) == SAVED
        assert ckpt.rollback(job.state, before=SAVED - 1) == SAVED - 1, "it waits, and goes back from the whole state"
        assert late.waited == 2
    told = [record.message for record in caplog.records if record.message.startswith("the rest of step")]
    assert len(told) == 2
    assert f"the rest of step {SAVED - 1} of {run} is there" in told[0]
    assert "training has waited" in told[0]


def test_a_fork_says_that_the_rest_arrives_elsewhere(run):
    train(0, run, SAVED)
    job = Job()
    with late_rest(), holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state, stream=True)
        child = os.fork()
        if child == 0:
            try:
                job.state["optimizer"].state_dict()
            except errors.ConfigurationError as error:
                os._exit(7 if "forked" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        job.step(SAVED)

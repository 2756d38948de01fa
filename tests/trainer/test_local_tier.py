"""The local tier in a job whose service is well: what is on the node, what is read from there, what when it is full."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import wait as wait_for

import pytest
import torch
from gloo import run_ranks
from tests.support.scripted_http import problem
from tests.support.training import Job, values

import holdfast
import holdfast.checkpointer
import holdfast.save.job
import holdfast.save.pipeline
from holdfast import errors
from holdfast.layout.plan import ChunkSizes
from holdfast.save.job import SaveState
from holdfast.save.pipeline import SaveReports
from holdfast_client.chunks import uploader
from holdfast_client.client import Client
from holdfast_client.errors import from_problem
from holdfast_client.local.chunk_folder import ChunkFolder
from holdfast_client.local.tier import LocalTier
from holdfast_client.settings import ClientSettings
from holdfast_protocol.checkpoints import AbortCheckpoint
from holdfast_protocol.problems import Problem
from holdfast_protocol.states import AttemptOutcome, CheckpointKind, CheckpointState

FRESH = 300_000
"""Elements of a state: 1.2 MB, in chunks of its own."""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "nvme"


def state_at(step):
    return {"big": {"tensor": torch.full((FRESH,), float(step)) + torch.arange(FRESH)}}


def hold_uploads(ckpt):
    """Nothing goes up until the event is set."""
    gate = threading.Event()
    commit = ckpt.parts.pipeline._commit
    ckpt.parts.pipeline._commit = lambda job: (gate.wait(60), commit(job))[1]
    return gate


def chunk_files(folder):
    return [folder / name / file for name in os.listdir(folder) if len(name) == 2 for file in os.listdir(folder / name)]


def spooled(folder):
    tier = LocalTier(folder, None)
    try:
        return [record.step for record in tier.spool.read().records], tier.folder.holds()
    finally:
        tier.close()


def test_without_a_local_tier_the_handle_says_that_nothing_is_on_the_node(run):
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore({})
        assert ckpt.save(0, {}).local.result(timeout=60) is False
        assert ckpt.stats.spooled == 0


def test_the_next_save_begins_while_earlier_ones_wait_for_their_upload_and_all_commit_in_order(run, folder):
    with holdfast.Checkpointer(run, local=folder) as ckpt:
        ckpt.restore(state_at(0))
        gate = hold_uploads(ckpt)
        handles = [ckpt.save(step, state_at(step)) for step in range(4)]
        assert [handle.local.result(timeout=60) for handle in handles] == [True] * 4
        assert not ckpt.wait(timeout_seconds=0), "none is committed"
        gate.set()
        views = [handle.committed.result(timeout=60) for handle in handles]
        assert sorted(view.committed_at for view in views) == [view.committed_at for view in views]
        assert (ckpt.stats.spooled, ckpt.stats.declined, ckpt.stats.committed_late) == (4, 0, 0)
    assert spooled(folder) == ([], []), "committed saves leave no record, and may be evicted"
    assert chunk_files(folder), "and are there for a relaunch"


def test_a_relaunch_reads_from_the_node_what_has_the_right_bytes_and_the_rest_from_the_store(
    run, folder, service, monkeypatch
):
    job = Job()
    with holdfast.Checkpointer(run, local=folder, chunk_sizes=ChunkSizes(256, 1024, 512)) as ckpt:
        ckpt.restore(job.state)
        job.step(0)
        ckpt.save(0, job.state).committed.result(timeout=60)
    files = chunk_files(folder)
    rotten = files[0]
    rotten.chmod(0o600)
    rotten.write_bytes(bytes([rotten.read_bytes()[0] ^ 1]) + rotten.read_bytes()[1:])
    found: dict[str, bool] = {}
    read = ChunkFolder.read_into

    def counted(self, digest, *args, **rest):
        found[digest] = read(self, digest, *args, **rest)
        return found[digest]

    monkeypatch.setattr(ChunkFolder, "read_into", counted)
    restored = Job(seed=3)
    with holdfast.Checkpointer(run, local=folder) as ckpt:
        assert ckpt.restore(restored.state) == 1
    assert values(restored.state) == values(job.state)
    assert sum(found.values()) > 3
    assert found.get(rotten.name, False) is False
    assert service.client.restores.restore_point(*run.split("/")).restore_point.step == 0


@pytest.mark.rule("late-save-adoption")
def test_a_disk_that_gives_a_save_back_no_more_keeps_no_later_save_from_the_store(run, folder, monkeypatch, caplog):
    monkeypatch.setattr(holdfast.save.pipeline, "SPOOL_READS", 2)
    with holdfast.Checkpointer(run, local=folder) as ckpt:
        ckpt.restore(state_at(0))
        gate = hold_uploads(ckpt)
        first = ckpt.save(0, state_at(0))
        assert first.local.result(timeout=60)
        [record] = ckpt.parts.tier.spool.read().records
        read = ChunkFolder.read_into

        def dies(self, digest, *args, **rest):
            if digest == record.chunks[0].digest:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(self, digest, *args, **rest)

        monkeypatch.setattr(ChunkFolder, "read_into", dies)
        second = ckpt.save(1, state_at(1))
        gate.set()
        assert second.committed.result(timeout=60).step == 1
        assert isinstance(first.committed.exception(timeout=60), errors.SaveSpooled)
        assert first.state is SaveState.SPOOLED
        assert "The saves after it go on" in caplog.text
        assert ckpt.stats.committed_late == 0, "the second was tried once"
    assert spooled(folder)[0] == [0], "for the next launch, or a person"


@pytest.mark.rule("late-save-adoption")
def test_a_save_that_is_refused_for_a_reason_that_only_a_newer_client_knows_stays_in_the_spool_and_is_told(
    run, folder, monkeypatch, caplog
):
    push = holdfast.save.pipeline.push_shard

    def refuses_the_first(writer, chunks, record):
        if record.step == 0:
            raise from_problem(Problem.model_validate_json(problem("not_yet_invented", status=422).body))
        return push(writer, chunks, record)

    monkeypatch.setattr(holdfast.save.pipeline, "push_shard", refuses_the_first)
    with holdfast.Checkpointer(run, local=folder) as ckpt:
        ckpt.restore(state_at(0))
        first, second = (ckpt.save(step, state_at(step)) for step in (0, 1))
        assert second.committed.result(timeout=60).step == 1
        assert isinstance(first.committed.exception(timeout=60), errors.SaveSpooled)
        assert "The saves after it go on" in caplog.text
    assert spooled(folder)[0] == [0]


def test_a_slow_store_holds_up_no_save_on_its_way_to_the_node(run, folder, monkeypatch):
    """The upload of an earlier save reads on only when the store has taken what it has read."""
    sending, store_takes_it = threading.Event(), threading.Event()
    put = uploader.put_chunk

    def slow(*args, **rest):
        sending.set()
        store_takes_it.wait(60)
        put(*args, **rest)

    monkeypatch.setattr(uploader, "put_chunk", slow)
    monkeypatch.setattr("holdfast_client.local.push.READ_AHEAD_BYTES", 1)  # a chunk at a time
    with holdfast.Checkpointer(run, local=folder, chunk_sizes=ChunkSizes(65536, 262144, 131072)) as ckpt:
        ckpt.restore({})
        first = ckpt.save(0, state_at(0))
        assert sending.wait(60)
        second = ckpt.save(1, state_at(1))
        try:
            assert second.local.result(timeout=50)
            assert not first.committed.done()
        finally:
            store_takes_it.set()
        assert [handle.committed.result(timeout=60).step for handle in (first, second)] == [0, 1]


def test_a_full_folder_lets_saves_go_straight_to_the_store_and_says_what_helps(run, folder, monkeypatch, caplog):
    monkeypatch.setenv("HOLDFAST_LOCAL_BYTES", "3000000")
    with holdfast.Checkpointer(run, local=folder) as ckpt:
        ckpt.restore(state_at(0))
        gate = hold_uploads(ckpt)
        handles = [ckpt.save(step, state_at(step)) for step in range(3)]
        assert [handle.local.result(timeout=60) for handle in handles] == [True, True, False]
        assert "`holdfast spool list` shows them; raise HOLDFAST_LOCAL_BYTES" in caplog.text
        gate.set()
        assert [handle.committed.result(timeout=60).step for handle in handles] == [0, 1, 2]
        last = ckpt.save(3, state_at(3))
        assert last.local.result(timeout=60), "what is committed made room"
        last.committed.result(timeout=60)
        assert (ckpt.stats.spooled, ckpt.stats.committed) == (3, 4)
    restored = state_at(9)
    with holdfast.Checkpointer(run, local=folder) as ckpt:
        assert ckpt.restore(restored) == 4
    assert torch.equal(restored["big"]["tensor"], state_at(3)["big"]["tensor"])


def test_a_disk_that_fails_costs_the_copy_on_the_node_and_not_the_save(run, folder, monkeypatch, caplog):
    def broken(self, *args, **rest):
        raise OSError(5, "Input/output error")

    with holdfast.Checkpointer(run, local=folder) as ckpt:
        ckpt.restore({})
        monkeypatch.setattr(ChunkFolder, "add", broken)
        handle = ckpt.save(0, state_at(0))
        assert handle.local.result(timeout=60) is False
        assert handle.committed.result(timeout=60).step == 0
    assert "cannot be written to" in caplog.text
    assert spooled(folder) == ([], [])


def test_a_save_through_a_window_that_finds_no_room_fails_alone(run, folder, monkeypatch):
    sizes = ChunkSizes(65536, 262144, 131072)
    monkeypatch.setenv("HOLDFAST_LOCAL_BYTES", "1000000")
    with holdfast.Checkpointer(run, local=folder, host_memory=600_000, chunk_sizes=sizes) as ckpt:
        ckpt.restore({})
        handle = ckpt.save(0, state_at(0))
        assert isinstance(handle.committed.exception(timeout=60), errors.SaveFailed)
        small = {"big": {"tensor": torch.arange(200_000.0)}}
        assert ckpt.save(1, small).committed.result(timeout=60).step == 1
        assert ckpt.stats.spooled == 1


def test_a_save_that_found_no_room_gives_back_no_memory_of_the_save_after_it(run, folder, monkeypatch):
    """It ends on the upload thread, when the next save is in the slab and on its way to the node's disk."""
    monkeypatch.setenv("HOLDFAST_LOCAL_BYTES", "1000000")
    sizes = ChunkSizes(65536, 262144, 131072)
    with holdfast.Checkpointer(run, local=folder, host_memory=600_000, chunk_sizes=sizes) as ckpt:
        ckpt.restore({})
        gate, disk = hold_uploads(ckpt), threading.Event()
        first = ckpt.save(0, state_at(0))
        # save() may return as soon as the last chunk is in the window: before the disk is found full.
        assert ckpt.parts.pipeline.wait_free(60)
        add = ChunkFolder.add
        monkeypatch.setattr(ChunkFolder, "add", lambda *args, **rest: disk.wait(60) and add(*args, **rest))
        second = ckpt.save(1, {"big": {"tensor": torch.arange(100_000.0)}})
        gate.set()
        assert isinstance(first.committed.exception(timeout=60), errors.SaveFailed)
        try:
            assert ckpt.parts.pipeline.busy
        finally:
            disk.set()
        assert second.committed.result(timeout=60).step == 1


def test_other_content_for_a_step_that_is_committed_is_given_up_and_leaves_the_spool(run, folder):
    with holdfast.Checkpointer(run, local=folder) as ckpt:
        ckpt.restore({})
        ckpt.save(0, state_at(0)).committed.result(timeout=60)
        again = ckpt.save(0, state_at(0))
        assert again.committed.result(timeout=60).step == 0, "the same content is the same checkpoint"
        other = ckpt.save(0, state_at(1))
        assert isinstance(other.committed.exception(timeout=60).__cause__, errors.HoldfastError)
        assert ckpt.save(1, state_at(1)).committed.result(timeout=60).step == 1
    assert spooled(folder) == ([], [])


def one_rank_fails(rank, run, folder):
    """Rank 1 cannot read its own shard of step 1 any more, when rank 0 has not come to that save yet."""
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True, local=folder) as ckpt:
        ckpt.restore(job.state)
        ckpt.save(0, job.state).committed.result(timeout=60)
        gate = hold_uploads(ckpt)
        handles = []
        for step in (1, 2):
            job.step(step)
            handles.append(ckpt.save(step, job.state))
            handles[-1].local.result(timeout=60)
        if rank == 1:
            tier = LocalTier(folder, None)
            by_name = {(each.step, each.rank): each for each in tier.spool.read().records}
            record = by_name.pop((1, 1))
            own = {chunk.digest for chunk in record.chunks} - {
                c.digest for each in by_name.values() for c in each.chunks
            }
            digest = min(own)
            os.unlink(folder / digest[:2] / digest)
            gate.set()
            handles[0].committed.exception(timeout=60)
        torch.distributed.barrier()
        gate.set()
        return type(handles[0].committed.exception(timeout=60)).__name__, handles[1].committed.result(timeout=60).step


def test_a_rank_that_gives_a_save_up_keeps_nobody_waiting_and_the_next_save_commits(run, folder):
    assert run_ranks(one_rank_fails, 2, run, folder) == [("SaveFailed", 2)] * 2
    assert spooled(folder) == ([], [])


def one_rank_cannot_push(rank, run, folder):
    """Rank 1 meets an error that nothing foresees when it pushes step 1. Its record stays whole."""
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True, local=folder) as ckpt, pytest.MonkeyPatch.context() as broken:
        broken.setattr(holdfast.save.job, "LONG_POLL_SECONDS", 1)
        ckpt.restore(job.state)
        ckpt.save(0, job.state).committed.result(timeout=60)
        if rank == 1:
            broken.setattr(holdfast.save.pipeline, "push_shard", raises(MemoryError("no room to read it")))
        job.step(1)
        failed = ckpt.save(1, job.state).committed.exception(timeout=60)
    return type(failed).__name__


def resumes_at(rank, run, folder):
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, local=folder) as ckpt:
        return ckpt.restore(job.state)


@pytest.mark.rule("late-save-adoption")
def test_a_save_that_one_rank_leaves_in_its_spool_stays_in_the_others_and_the_next_launch_commits_it(run, folder):
    assert run_ranks(one_rank_cannot_push, 2, run, folder) == ["SaveSpooled"] * 2
    assert run_ranks(resumes_at, 2, run, folder) == [2] * 2
    assert spooled(folder) == ([], [])


def one_rank_hears_of_an_abort(rank, run, folder):
    """A person gives step 1 up when rank 0 has sealed it, and rank 1 has not come to that save yet."""
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True, local=folder) as ckpt:
        ckpt.restore(job.state)
        gate = hold_uploads(ckpt)
        handles = []
        for step in (1, 2):
            job.step(step)
            handles.append(ckpt.save(step, job.state))
            handles[-1].local.result(timeout=60)
        if rank == 0:
            gate.set()
            abort_when_sealed(ckpt, run)
            handles[0].committed.exception(timeout=60)
        torch.distributed.barrier()
        gate.set()
        failed = handles[0].committed.exception(timeout=60)
        return type(failed).__name__, "not this one" in str(failed), handles[1].committed.result(timeout=60).step


def abort_when_sealed(ckpt, run):
    with Client() as client:
        sealed = None
        while sealed is None:
            sealed = next((view for view in client.checkpoints.all(*run.split("/")) if view.sealed_ranks), None)
        client.checkpoints.abort(
            sealed.id, AbortCheckpoint(**ckpt.parts.session.fence.model_dump(), reason="not this one")
        )


def test_a_rank_that_drops_a_save_for_an_abort_it_heard_of_keeps_nobody_waiting(run, folder, service):
    assert run_ranks(one_rank_hears_of_an_abort, 2, run, folder) == [("SaveFailed", True, 2)] * 2
    assert sorted(view.step for view in service.client.checkpoints.all(*run.split("/"))) == [1, 2], "none begun anew"
    assert spooled(folder) == ([], [])


def give_up_while_rank_0_writes(rank, run, folder, late_seconds):
    """Rank 1 has sealed step 1 and waits for the others. Rank 0's disk is still writing it. Rank 1's training thread
    comes late."""
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True, local=folder) as ckpt:
        ckpt.restore(job.state)
        ckpt.save(0, job.state).committed.result(timeout=60)
        pipeline, disk, sealed = ckpt.parts.pipeline, threading.Event(), threading.Event()
        kept, wait = pipeline._kept, pipeline._watch.wait
        if rank == 0:
            pipeline._kept = lambda *args: (disk.wait(60), kept(*args))[1]
        pipeline._watch.wait = lambda *args: (sealed.set(), wait(*args))[1]
        job.step(1)
        given_up = ckpt.save(1, job.state)
        if rank == 1:
            assert sealed.wait(60)
        torch.distributed.barrier()
        if rank == 1:
            wait_for([given_up.committed], timeout=late_seconds)
        pipeline.supersede("There is no time")
        disk.set()
        ended = given_up.committed.exception(timeout=60)
        job.step(2)
        return type(ended).__name__, given_up.state, ckpt.save(2, job.state).committed.result(timeout=60).step


@pytest.mark.rule("finish-or-supersede")
@pytest.mark.parametrize("late_seconds", [0, 2])
def test_a_save_that_is_given_up_while_rank_0_writes_it_stays_on_disk_and_keeps_nobody_waiting(
    run, folder, service, late_seconds
):
    ended = run_ranks(give_up_while_rank_0_writes, 2, run, folder, late_seconds)
    assert ended == [("SaveSuperseded", SaveState.SPOOLED, 2)] * 2
    views = sorted(service.client.checkpoints.all(*run.split("/")), key=lambda view: view.step)
    assert [(view.step, view.state) for view in views] == [
        (0, CheckpointState.COMMITTED),
        (1, CheckpointState.ABORTED),
        (2, CheckpointState.COMMITTED),
    ]
    assert spooled(folder)[0] == [1, 1]


@pytest.mark.rule("finish-or-supersede")
def test_of_saves_that_are_given_up_the_first_that_is_not_committed_is_aborted(run, folder, service):
    with holdfast.Checkpointer(run, local=folder) as ckpt:
        ckpt.restore({})
        pipeline, committed, heard = ckpt.parts.pipeline, threading.Event(), threading.Event()
        forget = pipeline._forget
        pipeline._forget = lambda job: (committed.set(), heard.wait(60), forget(job))
        handles = [ckpt.save(step, state_at(step)) for step in range(2)]
        assert committed.wait(60)
        pipeline.supersede("There is no time")
        heard.set()
        assert handles[0].committed.result(timeout=60).step == 0
        assert isinstance(handles[1].committed.exception(timeout=60), errors.SaveSuperseded)
    views = sorted(service.client.checkpoints.all(*run.split("/")), key=lambda view: view.step)
    assert [view.state for view in views] == [CheckpointState.COMMITTED, CheckpointState.ABORTED]


def one_rank_could_not_stage(rank, run, folder):
    """Rank 1 has no bytes of step 1, and cannot even begin it to tell the service so."""
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True, local=folder) as ckpt:
        ckpt.restore(job.state)
        with pytest.MonkeyPatch.context() as broken:
            if rank == 1:
                broken.setattr(ckpt.parts.saver._staging, "stage", raises(MemoryError("no room")))
                broken.setattr(ckpt.parts.session, "shard_writer", raises(errors.ServiceUnavailable("unavailable")))
            else:
                gate = hold_uploads(ckpt)
            failing = ckpt.save(1, job.state)
            if rank == 1:
                failing.committed.exception(timeout=60)
            torch.distributed.barrier()
        if rank == 0:
            gate.set()
        follows = ckpt.save(2, job.state)
        failed = failing.committed.exception(timeout=60)
        return type(failed).__name__, follows.committed.result(timeout=60).step


def raises(error):
    def fail(*_, **__):
        raise error

    return fail


def test_a_rank_without_bytes_that_cannot_reach_the_service_keeps_nobody_waiting(run, folder):
    assert run_ranks(one_rank_could_not_stage, 2, run, folder) == [("SaveFailed", 2)] * 2
    assert spooled(folder) == ([], [])


def one_rank_has_no_room(rank, run, folder):
    """Each rank has its own folder; that of rank 1 takes one save."""
    state = {"big": {"tensor": torch.arange(float(FRESH)) + rank}}
    settings = ClientSettings(local_bytes=10**9 if rank == 0 else 2_000_000)
    with holdfast.Checkpointer(run, create=True, local=folder / str(rank), client_settings=settings) as ckpt:
        ckpt.restore(state)
        gate = hold_uploads(ckpt)
        handles = []
        for step in (0, 1):
            state["big"]["tensor"] += 1
            handles.append(ckpt.save(step, state))
            handles[-1].local.result(timeout=60)
        declined = ckpt.parts.saver.save(2, state, None, CheckpointKind.PERIODIC, wait=False)
        gate.set()
        steps = [handle.committed.result(timeout=60).step for handle in handles]
        return [handle.local.result() for handle in handles], steps, type(declined.committed.exception()).__name__


def test_where_one_rank_has_no_room_its_share_goes_straight_and_the_save_commits_whole(run, folder):
    assert run_ranks(one_rank_has_no_room, 2, run, folder) == [
        ([True, True], [0, 1], "SaveDeclined"),
        ([True, False], [0, 1], "SaveDeclined"),
    ]
    for rank in ("0", "1"):
        assert spooled(folder / rank) == ([], [])


def one_rank_has_no_folder(rank, run, folder):
    folder.mkdir(exist_ok=True)
    where = folder / "fine"
    if rank == 1:
        where = folder / "a file"
        where.write_text("")
    try:
        holdfast.Checkpointer(run, create=True, local=where)
    except errors.ConfigurationError as error:
        return str(error)


def test_a_folder_that_one_rank_cannot_use_is_told_on_all_ranks(run, folder):
    first, second = run_ranks(one_rank_has_no_folder, 2, run, folder)
    assert "a file cannot be used" in second
    assert first == f"On rank 1: {second}"


def test_close_leaves_neither_threads_nor_files_behind(run, folder):
    def job(first):
        with holdfast.Checkpointer(run, local=folder) as ckpt:
            start = ckpt.restore(state_at(0))
            assert (start == 0) == first
            ckpt.save(start, state_at(start)).committed.result(timeout=60)

    def open_files():
        return sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd))

    job(first=True)
    before = (open_files(), set(threading.enumerate()))
    for _ in range(3):
        job(first=False)
    after = (open_files(), set(threading.enumerate()))
    assert [name for name in after[0] if str(folder) in name] == []
    assert len(after[0]) <= len(before[0])
    assert after[1] <= before[1], "a thread of an earlier test may have ended meanwhile"


def _is_open(descriptor):
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


@pytest.mark.rule("late-save-adoption")
def test_a_job_that_ends_just_after_a_save_is_on_the_disk_does_not_call_it_lost(run, folder, monkeypatch):
    on_disk, ended = threading.Event(), threading.Event()

    def held(self):
        on_disk.set()
        ended.wait(60)

    monkeypatch.setattr(SaveReports, "kept", held)
    monkeypatch.setattr(holdfast.save.pipeline, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(holdfast.checkpointer, "_DRAIN_AFTER_ERROR_SECONDS", 0.1)
    ckpt = holdfast.Checkpointer(run, local=folder)
    ckpt.restore(state_at(0))
    handle = ckpt.save(0, state_at(0))
    assert on_disk.wait(60)
    ckpt.close(AttemptOutcome.FAILED)
    ended.set()
    assert handle.state is SaveState.SPOOLED
    assert isinstance(handle.committed.exception(timeout=60), errors.SaveSpooled)
    assert spooled(folder)[0] == [0]


def leaves_a_save_on_the_node(_rank, run, folder):
    """Its process is killed when this returns."""
    ckpt = holdfast.Checkpointer(run, create=True, local=folder)
    state = {"model": torch.nn.Linear(8, 8)}
    ckpt.restore(state)
    hold_uploads(ckpt)
    return ckpt.save(4, state).local.result(timeout=60)


def restores_with_a_tier_on_rank_1(rank, run, folder):
    with holdfast.Checkpointer(run, local=folder if rank == 1 else None) as ckpt:
        return ckpt.restore({"model": torch.nn.Linear(8, 8)}), ckpt.stats.committed_late


@pytest.mark.rule("late-save-adoption")
def test_a_save_that_one_ranks_node_has_is_adopted_also_if_rank_0_has_no_local_tier(run, folder):
    assert run_ranks(leaves_a_save_on_the_node, 1, run, folder) == [True]
    assert run_ranks(restores_with_a_tier_on_rank_1, 2, run, folder) == [(5, 1)] * 2
    assert spooled(folder) == ([], [])

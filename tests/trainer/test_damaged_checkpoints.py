"""A stored byte changed, a file gone, a file cut: the restore reports it, and all ranks go on from the one before."""

from __future__ import annotations

import dataclasses
import json
import logging
import zlib

import pytest
import torch
from gloo import run_ranks
from tests.support.damage import DAMAGES, files_of, flip
from tests.support.training import Job, train, values

import holdfast
from holdfast import errors
from holdfast.export.pull import Format, pull
from holdfast.restore.checkpoint_reader import CheckpointSource
from holdfast_client.chunks import fetcher
from holdfast_client.chunks.transfer import OutgoingChunk, get_chunk
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.errors import ChunkCorrupt
from holdfast_client.local.tier import LocalTier
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import Component, IndexOrdinals, ShardSummary
from holdfast_protocol.digests import chunk_digest
from holdfast_protocol.runs import Latest
from holdfast_protocol.states import CheckpointKind, Health


@pytest.fixture(autouse=True)
def _saves_are_proven(monkeypatch):
    """Saves go through the service, which hashes what it writes. Files handed over through the mount would be read
    again in the background, which may find their damage before the restore does."""
    monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")


def chunk_lists(service, run):
    """Per checkpoint, newest first: its id and the digests of all its chunks."""
    found = []
    for view in service.client.checkpoints.all(*run.split("/")):
        digests = set()
        for rank in range(view.world_size):
            digests |= {chunk.digest for chunk in service.client.checkpoints.shard_chunks(view.id, rank).chunks}
        found.append((view.id, digests))
    return found


def distinct_saves(run, steps=2):
    """Checkpoints that share no chunk but the layout: every component changes between two of them."""
    state = {"model": torch.nn.Linear(4, 4), "notes": {"n": 0}}
    with holdfast.Checkpointer(run, create=True) as ckpt:
        ckpt.restore(state)
        for step in range(steps):
            distinct_save(ckpt, state, step).result(timeout=60)


def distinct_save(ckpt, state, step):
    with torch.no_grad():
        state["model"].weight.fill_(step + 1)
    state["notes"]["n"] = step
    return ckpt.save(step, state).committed


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", ["tensors", "index"])
def test_damage_in_the_newest_is_reported_marked_and_the_one_before_taken(
    service, run, damage, which, caplog, monkeypatch
):
    distinct_saves(run)
    (newest, its_chunks), (before, older_chunks) = chunk_lists(service, run)
    index = service.client.checkpoints.manifest(newest).shards[0].index_digest
    own = its_chunks - older_chunks
    for digest in own & {index} if which == "index" else own - {index}:
        for path in files_of(service.store, digest):
            DAMAGES[damage](path)
    monkeypatch.delenv("HOLDFAST_DIRECT_FILES")
    state = {"model": torch.nn.Linear(4, 4), "notes": {}}
    with caplog.at_level(logging.WARNING, logger="holdfast"), holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(state) == 1
    assert state["notes"] == {"n": 0}
    assert state["model"].weight.unique().tolist() == [1.0]
    assert service.client.checkpoints.get(newest).health is Health.CORRUPT
    assert service.client.checkpoints.get(before).health is Health.OK
    assert "step 1 of" in caplog.text
    assert "taking step 0 instead" in caplog.text


def test_a_damaged_layout_that_all_checkpoints_share_raises_and_touches_nothing(service, run):
    distinct_saves(run)
    (newest, its_chunks), (_, older_chunks) = chunk_lists(service, run)
    assert service.client.checkpoints.manifest(newest).layout_digest in its_chunks & older_chunks
    for path in files_of(service.store, service.client.checkpoints.manifest(newest).layout_digest):
        flip(path)
    state = {"model": torch.nn.Linear(4, 4), "notes": {"mine": 1}}
    before = state["model"].weight.tolist()
    with holdfast.Checkpointer(run) as ckpt, pytest.raises(errors.NoRestorePoint):
        ckpt.restore(state)
    assert state["model"].weight.tolist() == before
    assert state["notes"] == {"mine": 1}


def restore_where_rank_1_reads_an_index_of_another_layout(rank, run):
    if rank == 1:
        read = CheckpointSource.indexes
        CheckpointSource.indexes = lambda *asked: {
            at: dataclasses.replace(index, layout_digest="0" * 64) for at, index in read(*asked).items()
        }
    with holdfast.Checkpointer(run) as ckpt:
        try:
            return ckpt.restore(Job(rank).state)
        except errors.NoRestorePoint as error:
            return type(error).__name__


@pytest.mark.rule("one-vote-per-step")
def test_an_index_of_another_layout_on_one_rank_makes_all_ranks_take_an_earlier_one(run):
    run_ranks(train, 2, run, 1, timeout_seconds=120)
    refused = run_ranks(restore_where_rank_1_reads_an_index_of_another_layout, 2, run, timeout_seconds=120)
    assert refused == ["NoRestorePoint"] * 2


def restore_where_rank_1_reads_one_chunk_wrong(rank, run):
    wrong = []

    def get(ticket, into, digest, *given, **options):
        wrong.append(digest)
        if rank == 1 and digest == wrong[0]:
            raise ChunkCorrupt(digest, "mismatch", "its memory is bad")
        return get_chunk(ticket, into, digest, *given, **options)

    fetcher.get_chunk = get
    job = Job(rank)
    before = values(job.state)
    with holdfast.Checkpointer(run) as ckpt:
        try:
            return ckpt.restore(job.state)
        except errors.HoldfastError as error:
            return type(error).__name__, "On rank 1: " in str(error), values(job.state) == before


@pytest.mark.rule("report-is-suspicion")
def test_what_only_one_ranks_machine_reads_wrong_sends_no_rank_to_an_older_checkpoint(service, run):
    run_ranks(train, 2, run, 2, timeout_seconds=120)
    refused = run_ranks(restore_where_rank_1_reads_one_chunk_wrong, 2, run, timeout_seconds=120)
    assert refused == [("ReadsWrongHere", True, True), ("ReadsWrongHere", False, True)]
    assert {view.health for view in service.client.checkpoints.all(*run.split("/"))} == {Health.OK}


def test_a_named_step_that_is_damaged_raises_and_never_falls_back(service, run):
    distinct_saves(run)
    (_, its_chunks), (_, older_chunks) = chunk_lists(service, run)
    for digest in its_chunks - older_chunks:
        for path in files_of(service.store, digest):
            flip(path)
    with holdfast.Checkpointer(run) as ckpt, pytest.raises((errors.IntegrityError, errors.ChunkGone)):
        ckpt.restore({"model": torch.nn.Linear(4, 4), "notes": {}}, at="1")


def test_a_step_whose_checkpoint_is_corrupt_is_not_called_committed_when_training_comes_to_it_again(service, run):
    """In the same attempt, and with the very same content."""
    state = {"model": torch.nn.Linear(4, 4), "notes": {"n": 0}}
    with holdfast.Checkpointer(run, create=True) as ckpt:
        ckpt.restore(state)
        for step in range(2):
            distinct_save(ckpt, state, step).result(timeout=60)
        (newest, its_chunks), (_, older_chunks) = chunk_lists(service, run)
        for digest in its_chunks - older_chunks:
            for path in files_of(service.store, digest):
                flip(path)
        assert ckpt.restore(state) == 1
        assert service.client.checkpoints.get(newest).health is Health.CORRUPT
        failed = distinct_save(ckpt, state, 1).exception(timeout=60)
        assert isinstance(failed, errors.SaveFailed)
        assert "was committed and is corrupt" in str(failed)
        assert "save under another step" in str(failed)
        assert distinct_save(ckpt, state, 2).result(timeout=60).step == 2


def test_what_is_saved_again_of_a_corrupt_step_stays_in_the_spool(service, run, tmp_path):
    """Its bytes may be the only good ones."""
    state, folder = {"model": torch.nn.Linear(4, 4), "notes": {"n": 0}}, tmp_path / "nvme"
    with holdfast.Checkpointer(run, create=True, local=folder) as ckpt:
        ckpt.restore(state)
        for step in range(2):
            distinct_save(ckpt, state, step).result(timeout=60)
        (_, its_chunks), (_, older_chunks) = chunk_lists(service, run)
        for digest in its_chunks - older_chunks:
            (folder / digest[:2] / digest).unlink()
            for path in files_of(service.store, digest):
                flip(path)
        assert ckpt.restore(state) == 1
        failed = distinct_save(ckpt, state, 1).exception(timeout=60)
        assert "was committed and is corrupt" in str(failed)
        assert distinct_save(ckpt, state, 2).result(timeout=60).step == 2
    tier = LocalTier(folder, None)
    assert [record.step for record in tier.spool.read().records] == [1]
    tier.close()


def malformed(document, change):
    text = json.loads(zlib.decompress(document))
    change(text)
    return zlib.compress(json.dumps(text).encode())


def overlap(layout):
    layout["shards"][0]["pieces"] = layout["shards"][0]["pieces"][:1] * 2


def grow(layout):
    next(iter(layout["tensors"].values()))["shape"] = [2**40, 2**20]


def lose_a_part(layout):
    layout["shards"][0]["pieces"].pop()


def spoil_a_tree(index):
    index["trees"]["notes"] = ["value", {"no such tag": 1}]


def save_malformed(run, step, *, change_layout=None, change_index=None):
    """A checkpoint that commits with all its digests right, whose documents say what cannot be."""
    state = {"model": torch.nn.Linear(4, 4), "notes": {"n": step}}
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(state)
        ckpt.save(step, state).committed.result(timeout=60)
        client = ckpt.parts.session.client
        name = RunName(*run.split("/"))
        point = client.restores.restore_point(name.project, name.run).restore_point
        with TransferWorkers(1) as workers, CheckpointSource(client, name, point, workers=workers) as source:
            manifest = source.manifest()
            layout, index = source.first_documents(manifest)
            chunks = source.documents(source.chunk_list(manifest, source.layout(manifest, layout), 0)).values()
            data = [chunk for chunk in chunks if not chunk.startswith(b"\x78\x9c")]
        index = dataclasses.replace(index, saved_as=index.saved_as._replace(step=step + 1))
        if change_layout is not None:
            layout = malformed(layout, change_layout)
            index = dataclasses.replace(index, layout_digest=chunk_digest(zlib.decompress(layout)))
        document = index.encode() if change_index is None else malformed(index.encode(), change_index)
        writer = ckpt.parts.session.shard_writer(step + 1, CheckpointKind.PERIODIC, ckpt.parts.workers)
        writer.upload(OutgoingChunk.of(chunk) for chunk in (*data, document, layout))
        size = Component(kind="extra", logical_bytes=sum(map(len, data)))
        index = IndexOrdinals(shard=len(data), layout=len(data) + 1)
        writer.seal(summary=ShardSummary(components={"model": size}), index=index)


@pytest.mark.rule("bounded-index")
@pytest.mark.parametrize(
    "changes",
    [{"change_layout": overlap}, {"change_layout": grow}, {"change_layout": lose_a_part},
     {"change_index": spoil_a_tree}],
    ids=["overlap", "grow", "lose a part", "tree"],
)  # fmt: skip
def test_a_document_that_says_what_cannot_be_is_that_checkpoints_fault_and_the_one_before_is_taken(
    service, run, tmp_path, caplog, changes
):
    save_malformed(run, 3, **changes)
    newest = next(service.client.checkpoints.all(*run.split("/")))
    assert (newest.step, newest.state) == (4, "committed")
    state = {"model": torch.nn.Linear(4, 4), "notes": {}}
    with caplog.at_level(logging.WARNING, logger="holdfast"), holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(state) == 4
    assert state["notes"] == {"n": 3}
    assert "step 4 of" in caplog.text
    assert "taking step 3 instead" in caplog.text
    notes = []
    with pytest.raises(errors.IntegrityError):
        pull(service.client, RunName(*run.split("/")), Latest(), tmp_path / "out", Format.TORCH, on_note=notes.append)
    assert notes == [f"step 4 cannot be pulled whole. The point before it is {run}@3."]
    assert list(tmp_path.iterdir()) == []


def of_a_newer_holdfast(document):
    kind, _, number = document["format"].rpartition("-")
    document["format"] = f"{kind}-{int(number) + 2}"  # the next one of an index is of tensor subclasses


@pytest.mark.parametrize("changed", ["change_layout", "change_index"])
def test_a_document_of_a_newer_holdfast_is_refused_and_no_older_checkpoint_is_taken(run, changed):
    save_malformed(run, 3, **{changed: of_a_newer_holdfast})
    state = {"model": torch.nn.Linear(4, 4), "notes": {}}
    before = state["model"].weight.tolist()
    with holdfast.Checkpointer(run) as ckpt:
        with pytest.raises(errors.NewerFormat, match=r"format is .*-[34], and this holdfast reads .*-[13]\. "):
            ckpt.restore(state)
        assert (state["model"].weight.tolist(), state["notes"]) == (before, {})
        assert ckpt.restore(state, at="3") == 4


def restore_malformed_job(rank, run):
    state = {"model": torch.nn.Linear(4, 4), "notes": {}}
    with holdfast.Checkpointer(run, replicated=["notes"]) as ckpt:
        return ckpt.restore(state), state["notes"]


@pytest.mark.rule("bounded-index")
def test_all_ranks_take_the_point_before_a_malformed_document(service, run):
    save_malformed(run, 3, change_layout=overlap)
    assert run_ranks(restore_malformed_job, 2, run, timeout_seconds=120) == [(4, {"n": 3})] * 2


def restore_job(rank, run):
    job = Job(rank, "ddp")
    before = values(job.state)
    with holdfast.Checkpointer(run) as ckpt:
        try:
            return ckpt.restore(job.state), values(job.state)["up.weight"]
        except errors.HoldfastError as error:
            return type(error).__name__, values(job.state) == before


@pytest.mark.rule("one-vote-per-step")
def test_all_ranks_take_the_same_earlier_point_when_one_rank_cannot_read_its_part(service, run):
    run_ranks(train, 2, run, 3, timeout_seconds=120)
    newest = next(service.client.checkpoints.all(*run.split("/")))
    index_of_rank_1 = service.client.checkpoints.manifest(newest.id).shards[1].index_digest
    for path in files_of(service.store, index_of_rank_1):
        flip(path)
    restored = run_ranks(restore_job, 2, run, timeout_seconds=120)
    assert [start for start, _ in restored] == [2, 2], "step 1, on the rank with the good index too"
    assert restored[0][1] == restored[1][1]
    assert service.client.checkpoints.get(newest.id).health is Health.CORRUPT


@pytest.mark.rule("one-vote-per-step")
def test_all_ranks_raise_untouched_where_no_candidate_is_left(service, run):
    run_ranks(train, 2, run, 2, timeout_seconds=120)
    for view in service.client.checkpoints.all(*run.split("/")):
        for path in files_of(service.store, service.client.checkpoints.manifest(view.id).shards[1].index_digest):
            if path.exists():
                path.unlink()
    assert run_ranks(restore_job, 2, run, timeout_seconds=120) == [("NoRestorePoint", True)] * 2

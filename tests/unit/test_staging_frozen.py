"""Tensors that are declared frozen: copied once, looked after at each save, and never taken at their word once they
were seen to change."""

from __future__ import annotations

import logging

import pytest
import torch

from holdfast.layout.plan import ChunkSizes
from holdfast.staging import StagingArea
from holdfast_protocol.digests import chunk_digest
from tests.support.staged import staged

SIZES = ChunkSizes(32, 64, 64)


class Job:
    """Saves the same tensors again and again, in one slab, as an upload does."""

    def __init__(self, tensors, declared, sizes=SIZES):
        self.area = StagingArea()
        self.tensors, self.declared, self.sizes = tensors, declared, sizes

    def save(self, upload_succeeds=True):
        """The bytes of each chunk, and whose digests were known."""
        shard = staged(self.tensors, self.sizes, self.area, self.declared)
        chunks = [bytes(shard.chunk(ordinal)) for ordinal in range(shard.chunk_count)]
        known = [shard.digest(ordinal) for ordinal in range(shard.chunk_count)]
        digests = [chunk_digest(chunk) for chunk in chunks]
        assert all(digest in (None, right) for digest, right in zip(known, digests, strict=True))
        if upload_succeeds:
            shard.hashed([*digests, chunk_digest(b"the index")])
        self.plan = shard.plan
        shard.release()
        return chunks, [digest is not None for digest in known]

    def chunks_of(self, name):
        [piece] = [piece for piece in self.plan.shard.pieces if piece.tensor == name]
        return [segment.ordinal for segment in piece.segments]

    def live(self):
        """What the chunks must be if nothing was left out."""
        shard = staged(self.tensors, self.sizes, None, self.declared)
        return [bytes(shard.chunk(ordinal)) for ordinal in range(shard.chunk_count)]


def behind_the_back(tensor):
    """Changes a tensor as an EMA does: neither place nor version tell of it."""
    version = tensor._version
    tensor.data.add_(1.0)
    assert tensor._version == version


def base_and_head():
    tensors = {f"base.{at}": torch.full((4 + 10 * at,), float(at)) for at in range(4)}
    return Job(tensors | {"head": torch.zeros(20)}, tuple(tensors))


def test_a_second_save_neither_copies_nor_hashes_what_is_declared_frozen():
    job = base_and_head()
    _, known = job.save()
    assert not any(known)
    # That the second save does not copy shows in bytes that it cannot know of; base.2 is the one that is compared then.
    behind_the_back(job.tensors["base.3"])
    job.tensors["head"] += 1
    job.area._places[0].layout.frozen._turn = 1
    chunks, known = job.save()
    frozen = {ordinal for name in job.declared for ordinal in job.chunks_of(name)}
    assert [at for at, is_known in enumerate(known) if is_known] == sorted(frozen)
    live = job.live()
    assert {at for at in range(len(chunks)) if chunks[at] != live[at]} == set(job.chunks_of("base.3"))


def test_a_change_that_autograd_sees_is_staged_at_once_and_named(caplog):
    job = base_and_head()
    job.save()
    with torch.no_grad():
        job.tensors["base.1"][3] = 7.0
    with caplog.at_level(logging.ERROR, "holdfast"):
        chunks, known = job.save()
    assert chunks == job.live()
    assert "'base.1' is declared frozen" in caplog.text
    assert not any(known[ordinal] for ordinal in job.chunks_of("base.1"))
    assert all(known[ordinal] for ordinal in job.chunks_of("base.3"))


def test_a_change_that_nothing_tells_of_is_found_when_it_is_the_tensors_turn(caplog):
    job = base_and_head()
    job.save()
    behind_the_back(job.tensors["base.2"])
    with caplog.at_level(logging.ERROR, "holdfast"):
        found_after = next(number for number in range(1, 10) if job.save()[0] == job.live())
    assert found_after <= len(job.declared), "each of them has had its turn by then"
    assert caplog.text.count("'base.2' is declared frozen") == 1


@pytest.mark.parametrize("upload_succeeds", [True, False])
def test_what_has_changed_once_is_staged_at_every_save_from_then_on(caplog, upload_succeeds):
    job = base_and_head()
    job.save()
    job.tensors["base.1"] += 1
    job.save(upload_succeeds)
    for _ in range(3):
        behind_the_back(job.tensors["base.1"])
        chunks, known = job.save(upload_succeeds)
        assert chunks == job.live()
        assert not any(known[ordinal] for ordinal in job.chunks_of("base.1"))
    # A new plan takes another slab and does not forget it.
    job.tensors["more"] = torch.ones(3)
    for _ in range(3):
        behind_the_back(job.tensors["base.1"])
        assert job.save()[0] == job.live()
    assert caplog.text.count("is declared frozen") == 1


def test_a_tensor_that_moved_or_was_written_with_the_same_bits_is_no_change(caplog):
    job = base_and_head()
    job.save()
    job.tensors["base.1"] = job.tensors["base.1"].clone()
    job.tensors["base.3"].copy_(job.tensors["base.3"].clone())
    chunks, known = job.save()
    assert chunks == job.live()
    assert all(known[ordinal] for name in job.declared for ordinal in job.chunks_of(name))
    assert not caplog.text


def test_negative_zero_and_nan_are_compared_by_their_bits(caplog):
    job = Job({"a": torch.zeros(8), "b": torch.full((8,), float("nan"))}, ("a", "b"))
    job.save()
    job.tensors["a"].neg_()
    job.tensors["b"].mul_(1.0)
    chunks, _ = job.save()
    assert chunks == job.live()
    assert "'a' is declared" in caplog.text
    assert "'b' is declared" not in caplog.text


def test_tensors_without_a_version_are_compared_at_each_save():
    with torch.inference_mode():
        tensors = {"a": torch.zeros(8), "b": torch.zeros(8)}
        job = Job(tensors, ("a", "b"))
        job.save()
        tensors["a"].add_(1)
        tensors["b"].add_(1)
    assert job.save()[0] == job.live()


def test_a_digest_is_known_only_after_an_upload_that_has_told_it():
    job = base_and_head()
    job.save(upload_succeeds=False)
    chunks, known = job.save()
    assert not any(known)
    assert chunks == job.live()
    assert any(job.save()[1])


def test_after_a_restore_everything_is_staged_again():
    job = base_and_head()
    job.save()
    behind_the_back(job.tensors["base.3"])
    job.area.forget_frozen()
    chunks, known = job.save()
    assert chunks == job.live()
    assert not any(known)


def test_a_copy_that_fails_leaves_nothing_that_is_taken_for_staged(monkeypatch):
    job = base_and_head()
    job.save()
    job.area.forget_frozen()
    behind_the_back(job.tensors["base.3"])

    def fails(self, copies):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as broken:
        broken.setattr("holdfast.staging.copy.Copier.start", fails)
        with pytest.raises(RuntimeError, match="device is gone"):
            job.save()
    chunks, known = job.save()
    assert chunks == job.live()
    assert not any(known)


def test_declared_tensors_never_share_a_chunk_with_others():
    job = Job({f"t{at}": torch.ones(2) for at in range(6)}, ("t1", "t3", "t4"))
    job.save()
    declared = {ordinal for name in job.declared for ordinal in job.chunks_of(name)}
    others = {ordinal for name in ("t0", "t2", "t5") for ordinal in job.chunks_of(name)}
    assert declared.isdisjoint(others)


def test_in_a_window_everything_is_staged_at_every_save(caplog):
    job = base_and_head()
    job.area = StagingArea(window_bytes=64)
    staged(job.tensors, SIZES, job.area, job.declared).release()
    assert "larger than host_memory" in caplog.text

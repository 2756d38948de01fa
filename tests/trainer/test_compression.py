"""Saving with compress="zstd": fewer bytes on the wire, the same bits back, whatever was saved how before."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import holdfast
from holdfast import errors
from holdfast.export.pull import Format, pull
from holdfast_client.chunks import uploader
from holdfast_client.chunks.uploader import encode_chunk
from holdfast_protocol.attempts import OpenAttempt
from holdfast_protocol.checkpoints import BeginCheckpoint, ChunkOffer, NegotiateChunks
from holdfast_protocol.restores import ReadChunks
from holdfast_protocol.runs import Latest, parse_run
from holdfast_protocol.states import Health

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)
SIZES = holdfast.ChunkSizes(own_chunk_bytes=2**17, pack_bytes=2**17, cut_bytes=2**19)
"""Chunks of 512 KiB: a tensor of the tests has several, and the last one is no whole number of blocks."""


class Weights(nn.Module):
    """One tensor of each dtype, as small weights are; noise, which no codec makes smaller; NaN and infinity."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        for dtype in DTYPES:
            count = 400_003 // dtype.itemsize
            values = torch.randn(count, generator=draw, dtype=torch.float64) * 0.02
            values[:3] = torch.tensor([float("nan"), float("inf"), -0.0])
            self.register_buffer(f"as_{str(dtype).removeprefix('torch.')}", values.to(dtype))
        self.register_buffer("noise", torch.randint(0, 256, (300_001,), generator=draw, dtype=torch.uint8))
        self.register_buffer("counts", torch.arange(70_001) + 100_000 * seed)
        self.register_buffer("small", torch.ones(7))

    def bits(self) -> dict[str, bytes]:
        return {name: value.view(torch.uint8).numpy().tobytes() for name, value in self.state_dict().items()}


def save(run: str, model: nn.Module, step: int, *, compress: str | None = None) -> holdfast.Checkpointer:
    with holdfast.Checkpointer(run, compress=compress, chunk_sizes=SIZES, create=True) as ckpt:
        ckpt.restore({"model": Weights(0)})
        ckpt.save(step, {"model": model}).committed.result(60)
    return ckpt


def restored(run: str, at: str | None = None) -> dict[str, bytes]:
    model = Weights(0)
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore({"model": model}, at)
    return model.bits()


def codecs_of(service, run: str) -> dict[str, str]:
    """By digest, how the newest checkpoint's chunks are stored."""
    newest = next(service.client.checkpoints.all(*run.split("/")))
    digests = [chunk.digest for chunk in service.client.checkpoints.shard_chunks(newest.id, 0).chunks]
    reads = service.client.restores.read_chunks(newest.id, ReadChunks(digests=sorted(set(digests))))
    return {ticket.digest: ticket.codec.value for ticket in reads.chunks}


def wait_until_proven(service, run: str) -> None:
    """Until the service has read all chunks of the newest checkpoint: it will not look at them again by itself."""
    project, name = run.split("/")
    newest = next(service.client.checkpoints.all(project, name))
    chunks = service.client.checkpoints.shard_chunks(newest.id, 0).chunks
    opened = service.client.attempts.open(
        project, f"{name}.other", OpenAttempt(launch_id="x" * 32, after=0, world_size=1, create=True)
    )
    fence = {"epoch": opened.epoch, "attempt": opened.attempt}
    begun = service.client.checkpoints.begin(project, f"{name}.other", BeginCheckpoint(**fence, step=0, world_size=1))
    asked = NegotiateChunks(
        **fence, chunks=[ChunkOffer(digest=each.digest, bytes=each.bytes, ask=True) for each in chunks]
    )
    until = time.monotonic() + 120
    while any(each.status != "present" for each in service.client.checkpoints.negotiate(begun.id, 0, asked).chunks):
        assert time.monotonic() < until
        time.sleep(0.2)


def file_of(service, digest: str) -> Path:
    (path,) = (path for path in service.store.glob(f"**/{digest}/*") if path.suffix != ".sha256")
    return path


@pytest.mark.parametrize("direct_files", ["true", "false"])
def test_what_was_saved_compressed_comes_back_bit_for_bit(service, run, monkeypatch, direct_files) -> None:
    monkeypatch.setenv("HOLDFAST_DIRECT_FILES", direct_files)
    model = Weights(1 if direct_files == "true" else 2)
    stats = save(run, model, 0, compress="zstd").stats
    assert restored(run) == model.bits()
    assert stats.sent_bytes < 0.9 * stats.sent_chunk_bytes
    assert {"raw", "zstd", "zstd-shuffle2", "zstd-shuffle4", "zstd-shuffle8"} == set(codecs_of(service, run).values())
    newest = next(service.client.checkpoints.all(*run.split("/")))
    assert newest.uploaded_bytes == stats.sent_bytes
    assert newest.chunk_bytes - newest.deduplicated_bytes == stats.sent_chunk_bytes


def test_the_setting_is_read_from_the_environment(run, monkeypatch) -> None:
    monkeypatch.setenv("HOLDFAST_COMPRESS", "zstd")
    stats = save(run, Weights(3), 0).stats
    assert stats.sent_bytes < 0.9 * stats.sent_chunk_bytes
    stats = save(run, Weights(4), 1, compress="none").stats
    assert stats.sent_bytes == stats.sent_chunk_bytes > 0


def test_another_compression_than_those_is_refused(run) -> None:
    with pytest.raises(errors.ConfigurationError, match="HOLDFAST_COMPRESS"):
        holdfast.Checkpointer(run, compress="lzma")


def test_without_compression_everything_is_stored_raw(service, run) -> None:
    save(run, Weights(5), 0)
    assert set(codecs_of(service, run).values()) == {"raw"}


@pytest.mark.rule("present-is-referenced")
def test_what_is_there_raw_is_neither_sent_nor_compressed_again(run, monkeypatch) -> None:
    monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")
    model = Weights(6)
    save(run, model, 0)
    encoded: list[str] = []

    def counted(chunk, stop):
        encoded.append(chunk.digest)
        return encode_chunk(chunk, stop)

    monkeypatch.setattr(uploader, "encode_chunk", counted)
    stats = save(run, model, 1, compress="zstd").stats
    assert stats.sent_chunk_bytes < 16 * 1024, "only index and layout are new"
    assert encoded == []
    with torch.no_grad():
        model.as_float32.mul_(2)
    save(run, model, 2, compress="zstd")
    assert len(encoded) == 1
    assert restored(run) == model.bits()


def test_the_setting_may_change_between_attempts(service, run, monkeypatch) -> None:
    monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")
    model = Weights(7)
    for step, compress in enumerate(["zstd", "none", "zstd"]):
        with torch.no_grad():
            model.as_bfloat16.mul_(2)
        save(run, model, step, compress=compress)
        wait_until_proven(service, run)  # else the next attempt sends again what the service has not read yet
        assert restored(run) == model.bits()
    assert set(codecs_of(service, run).values()) >= {"raw", "zstd-shuffle2", "zstd-shuffle4"}


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.chmod(0o600)
    path.write_bytes(data)


@pytest.mark.rule("report-is-suspicion")
@pytest.mark.parametrize("hurt", [damage, lambda path: path.write_bytes(b""), Path.unlink], ids=["bit", "cut", "gone"])
def test_a_damaged_compressed_chunk_is_reported_and_the_point_before_taken(
    service, run, monkeypatch, caplog, hurt
) -> None:
    monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")
    older, newer = Weights(100), Weights(101)
    save(run, older, 0, compress="zstd")
    save(run, newer, 1, compress="zstd")
    wait_until_proven(service, run)
    digest = next(digest for digest, codec in codecs_of(service, run).items() if codec == "zstd-shuffle4")
    path = file_of(service, digest)
    path.chmod(0o600)
    hurt(path)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        assert restored(run) == older.bits()
    assert "taking step 0 instead" in caplog.text
    newest = next(service.client.checkpoints.all(*run.split("/")))
    assert newest.health is Health.CORRUPT


def test_weights_are_loaded_from_compressed_chunks(run) -> None:
    model, mine = Weights(10), Weights(0)
    save(run, model, 0, compress="zstd")
    holdfast.load_weights(run, mine)
    assert mine.bits() == model.bits()


def test_files_are_pulled_out_of_compressed_chunks(service, run, tmp_path) -> None:
    model = Weights(13)
    save(run, model, 0, compress="zstd")
    pull(service.client, parse_run(run), Latest(), tmp_path / "out", Format.TORCH)
    pulled = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert {name: value.view(torch.uint8).numpy().tobytes() for name, value in pulled.items()} == model.bits()


def test_ones_own_dcp_save_is_compressed_too(service, run) -> None:
    weights = torch.randn(300_000, generator=torch.Generator().manual_seed(14))
    loaded = {"weights": torch.zeros(300_000)}
    with holdfast.Checkpointer(run, compress="zstd") as ckpt:
        dcp.save({"weights": weights}, storage_writer=ckpt.writer(0), no_dist=True)
        dcp.load(loaded, storage_reader=ckpt.reader(), no_dist=True)
    assert torch.equal(loaded["weights"], weights)
    assert "zstd-shuffle4" in codecs_of(service, run).values()


def test_a_local_tier_keeps_what_compression_needs_to_know(service, run, tmp_path) -> None:
    model = Weights(11)
    with holdfast.Checkpointer(run, compress="zstd", local=tmp_path, chunk_sizes=SIZES) as ckpt:
        ckpt.save(0, {"model": model}).committed.result(60)
    assert "zstd-shuffle4" in codecs_of(service, run).values()
    assert restored(run) == model.bits()


def test_a_bounded_window_is_no_obstacle(run) -> None:
    model = Weights(12)
    with holdfast.Checkpointer(run, compress="zstd", host_memory=2**21, chunk_sizes=SIZES) as ckpt:
        ckpt.save(0, {"model": model}).committed.result(60)
    assert restored(run) == model.bits()

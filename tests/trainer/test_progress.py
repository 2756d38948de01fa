"""ckpt.progress while a save goes up and while a restore comes down, and the lines of a long restore."""

from __future__ import annotations

import logging

import torch

import holdfast
from holdfast import progress as progress_module
from holdfast.layout.plan import ChunkSizes
from holdfast.progress import Phase, ProgressMeter


def test_save_and_restore_tell_how_far_they_are(service, run, caplog, monkeypatch):
    monkeypatch.setattr(progress_module, "FIRST_REPORT_SECONDS", 0.0)
    seen = []
    advance = ProgressMeter.advance

    def noting(meter, count):
        due = advance(meter, count)
        seen.append(ckpt.progress)
        return due

    monkeypatch.setattr(ProgressMeter, "advance", noting)
    state = {"model": torch.nn.Linear(64, 64), "head": torch.nn.Linear(64, 8)}
    sizes = ChunkSizes(own_chunk_bytes=4096, cut_bytes=8192, pack_bytes=4096)
    with holdfast.Checkpointer(run, create=True, chunk_sizes=sizes) as ckpt:
        assert ckpt.restore(state) == 0
        ckpt.save(0, state).committed.result(timeout=60)
        assert ckpt.progress is None
    saved, seen = seen, []
    with caplog.at_level(logging.INFO, logger="holdfast"), holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(state) == 1
        assert ckpt.progress is None
    for phase, told in ((Phase.SAVING, saved), (Phase.RESTORING, seen)):
        assert {(progress.phase, progress.step) for progress in told} == {(phase, 0)}
        assert len({progress.bytes_total for progress in told}) == 1
        done = [progress.bytes_done for progress in told]
        assert max(done) == told[0].bytes_total > 16_000
        assert any(0 < each < told[0].bytes_total for each in done), "chunk by chunk"
    line = next(record.message for record in caplog.records if record.message.startswith("restoring"))
    assert f"restoring {run} from step 0: rank 0 has " in line
    assert "time left" in line

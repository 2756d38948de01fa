"""What many scripts do: torch.save into memory, boto3's upload_fileobj; back with download_fileobj and torch.load."""

from __future__ import annotations

import io
import time
from typing import Any

import boto3
import torch

from benchmarks.cases.restores import measure_restore
from benchmarks.cases.saves import Saved, measure_saves
from benchmarks.spec import Spec
from benchmarks.state import build


def run(spec: Spec) -> dict[str, Any]:
    s3 = boto3.client("s3", endpoint_url=spec.endpoint, region_name="us-east-1")
    state = build(spec.size_bytes, seed=1 if "number" in spec.options else 0)

    def save(number: int) -> Saved:
        began = time.perf_counter()
        state_dict = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}
        state_dict_seconds = time.perf_counter() - began
        file = io.BytesIO()
        torch.save(state_dict, file)
        sent_bytes = file.tell()
        file.seek(0)
        s3.upload_fileobj(file, spec.bucket, _key(number))
        return Saved(time.perf_counter(), state_dict_seconds, sent_bytes)

    def restore() -> None:
        file = io.BytesIO()
        s3.download_fileobj(spec.bucket, _key(spec.options["number"]), file)
        file.seek(0)
        state_dict = torch.load(file, weights_only=True)
        state.model.load_state_dict(state_dict["model"])
        state.optimizer.load_state_dict(state_dict["optimizer"])

    return measure_restore(spec, state, restore) if "number" in spec.options else measure_saves(spec, state, save)


def _key(number: int) -> str:
    return f"step-{number}.pt"

"""Who should sign for GCS: our signer or Google's library? The CPU of a URL, and whole saves with either.

    .venv/bin/python -m scripts.measure_signing

Against the stand-in for Google in tests/support. The saves take turns, so that a busy moment hits both. Service and
client are this process, so its CPU is theirs together. docs/adr/0049 has what it printed.
"""

from __future__ import annotations

import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.oauth2 import service_account
from tests.support.gcs_fake.process import GcsFake, gcs_fake
from tests.support.rank import Job
from tests.support.service import RunningService, running_service
from tests.support.stores import chunk_key

from holdfast_client import Client, ClientSettings
from holdfast_client.chunks.encoding import OutgoingChunk
from holdfast_client.chunks.uploader import ShardUploader
from holdfast_protocol.base import Fence
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import ObjectKey
from holdfast_service.stores.gcs.gcs_store import GcsStore

_URLS = 500
_REPEATS = 3
_SAVES = ((192, 16 * 1024), (48, 4 * 1024 * 1024))
"""Chunks and the bytes of each: as many signatures for as few bytes as can be, and something like a save."""

Presign = Callable[..., tuple[str, int]]


def _by_googles_library(gcs: GcsFake) -> Presign:
    credentials = service_account.Credentials.from_service_account_file(str(gcs.key_file))
    client = storage.Client(project="measured", credentials=AnonymousCredentials())

    def presign(
        store: GcsStore,
        method: str,
        key: ObjectKey,
        headers: Mapping[str, str],
        expires_in_seconds: int,
        *,
        public: bool = True,
    ) -> tuple[str, int]:
        del public
        blob = client.bucket(store.location.bucket).blob(store.location.key_prefix + key.path)
        url = blob.generate_signed_url(
            version="v4",
            expiration=timedelta(seconds=expires_in_seconds),
            api_access_endpoint=store.location.origin,
            method=method,
            headers=dict(headers),
            credentials=credentials,
        )
        return str(url), expires_in_seconds

    return presign


def _milliseconds_a_url(store: GcsStore, presign: Presign) -> float:
    best = float("inf")
    for _ in range(_REPEATS):
        began = time.process_time()
        for number in range(_URLS):
            presign(store, "PUT", chunk_key(str(number).encode()), {"content-length": "1"}, 900)
        best = min(best, (time.process_time() - began) / _URLS * 1000)
    return best


def _seconds_a_save(service: RunningService, client: Client, chunks: int, chunk_bytes: int) -> tuple[float, float]:
    """Of the clock, and of CPU."""
    job = Job(service.http(), f"measured/{secrets.token_hex(6)}")
    save = job.begin(1)
    bodies = [secrets.token_bytes(chunk_bytes) for _ in range(chunks)]
    began, began_cpu = time.perf_counter(), time.process_time()
    ShardUploader(client, save.id, 0, Fence(**job.fence)).upload([OutgoingChunk.of(body) for body in bodies])
    return time.perf_counter() - began, time.process_time() - began_cpu


def main() -> None:
    with gcs_fake() as gcs, tempfile.TemporaryDirectory() as folder:
        os.environ.update(gcs.environment)
        settings = ServiceSettings(data_dir=Path(folder), port=0, store=gcs.store_url_for("measured"))
        with running_service(settings) as service:
            store = service.context.store
            assert isinstance(store, GcsStore)
            signers = {"our signer": GcsStore.presign, "google-cloud-storage": _by_googles_library(gcs)}
            for name, presign in signers.items():
                print(f"{name}: {_milliseconds_a_url(store, presign):.3f} ms of CPU a URL")
            with Client(ClientSettings(url=service.url, token=service.token())) as client:
                for chunks, chunk_bytes in _SAVES:
                    took: dict[str, list[tuple[float, float]]] = {name: [] for name in signers}
                    for _ in range(_REPEATS):
                        for name, presign in signers.items():
                            GcsStore.presign = presign  # type: ignore[method-assign]
                            took[name].append(_seconds_a_save(service, client, chunks, chunk_bytes))
                    for name, saves in took.items():
                        clock, cpu = (statistics.median(each) for each in zip(*saves, strict=True))
                        print(f"{chunks} chunks of {chunk_bytes} bytes, {name}: {clock:.2f} s, CPU {cpu:.2f} s")


if __name__ == "__main__":
    main()

"""Where torch's DCP writes to and reads from: files, s3torchconnector, or s3fs through DCP's fsspec classes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, StorageReader, StorageWriter

from benchmarks.spec import Spec

_REGION = "us-east-1"


def writer(spec: Spec, number: int) -> StorageWriter:
    threads = int(spec.options.get("threads", 1))
    match spec.options["storage"]:
        case "files":
            return FileSystemWriter(_place(spec, number), thread_count=threads)
        case "s3torchconnector":
            from s3torchconnector.dcp import S3StorageWriter

            return S3StorageWriter(
                _REGION, _place(spec, number), s3client_config=_connector_config(spec), thread_count=threads
            )
        case _:
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

            return FsspecWriter(_place(spec, number), thread_count=threads, sync_files=False, **_s3fs_options(spec))


def reader(spec: Spec, number: int) -> StorageReader:
    match spec.options["storage"]:
        case "files":
            return FileSystemReader(_place(spec, number))
        case "s3torchconnector":
            from s3torchconnector.dcp import S3StorageReader

            return S3StorageReader(_REGION, _place(spec, number), s3client_config=_connector_config(spec))
        case _:
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

            return FsspecReader(_place(spec, number), **_s3fs_options(spec))


def written_bytes(spec: Spec, number: int) -> int:
    """0 where it did not write files."""
    if spec.options["storage"] != "files":
        return 0
    return sum(path.stat().st_size for path in Path(_place(spec, number)).iterdir())


def _place(spec: Spec, number: int) -> str:
    return f"{spec.folder if spec.options['storage'] == 'files' else f's3://{spec.bucket}'}/step-{number}"


def _connector_config(spec: Spec) -> Any:
    from s3torchconnector import S3ClientConfig

    os.environ["AWS_ENDPOINT_URL"] = spec.endpoint
    return S3ClientConfig(force_path_style=True)


def _s3fs_options(spec: Spec) -> dict[str, Any]:
    return {
        "key": os.environ["AWS_ACCESS_KEY_ID"],
        "secret": os.environ["AWS_SECRET_ACCESS_KEY"],
        "endpoint_url": spec.endpoint,
        "client_kwargs": {"region_name": _REGION},
    }

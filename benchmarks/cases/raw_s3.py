"""The ceiling of the wire: the chunks of Holdfast's own plan by bare presigned PUTs and GETs, as many at once.

No service, no hashing, no copy: the chunks are staged before the clock starts. With `checksum` each PUT carries its
SHA-256, computed before the clock starts too, which the server then checks: what that costs is the server's.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import urllib3
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from benchmarks.measure import used
from benchmarks.spec import Spec
from benchmarks.state import build
from holdfast.layout.plan import build_local_plan
from holdfast.settings import TrainerSettings
from holdfast.staging import StagingArea
from holdfast.state.capture import capture

_BLOCK_BYTES = 1024 * 1024


def run(spec: Spec) -> dict[str, Any]:
    state = build(spec.size_bytes)
    captured = capture(state.objects(), rank=0, world_size=1)
    staged = StagingArea().stage(build_local_plan(captured.specs, rank=0, world_size=1), captured.pieces)
    chunks = [staged.chunk(ordinal) for ordinal in range(staged.chunk_count)]
    # Written to, so that their pages are there.
    buffers = [memoryview(bytearray(b"\xff" * chunk.nbytes)) for chunk in chunks]
    bare = _BareS3(spec)
    headers = [bare.headers(chunk) for chunk in chunks]
    figures: dict[str, Any] = {"bytes": state.bytes}
    with ThreadPoolExecutor(TrainerSettings().transfers) as threads:

        def measured(name: str, method: str, one: Callable[..., None], bodies: list[memoryview], folder: int) -> None:
            of_chunks = headers if method == "PUT" else [{} for _ in bodies]
            urls = [bare.url(method, f"{folder}/{at}", extra) for at, extra in enumerate(of_chunks)]
            with used(spec.server_pids) as usage:
                list(threads.map(one, urls, of_chunks, bodies))
            figures[f"{name}_seconds"] = usage.wall_seconds
            figures[f"{name}_cpu_seconds"] = usage.cpu_seconds
            figures[f"{name}_server_cpu_seconds"] = usage.server_cpu_seconds

        for folder in range(2):  # the first warms up, the second stands
            measured("put", "PUT", bare.put, chunks, folder)
        for _ in range(2):
            measured("get", "GET", bare.get, buffers, 1)
    if any(buffer != chunk for buffer, chunk in zip(buffers, chunks, strict=True)):
        raise RuntimeError("what was read is not what was sent")
    return figures


class _BareS3:
    def __init__(self, spec: Spec) -> None:
        self._root = f"{spec.endpoint}/{spec.bucket}/bare"
        self._with_checksum = bool(spec.options.get("checksum"))
        self._credentials = Credentials(os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
        self._http = urllib3.PoolManager(maxsize=64, retries=False)

    def headers(self, chunk: memoryview) -> dict[str, str]:
        headers = {"Content-Length": str(chunk.nbytes)}
        if self._with_checksum:
            headers["x-amz-checksum-sha256"] = base64.b64encode(hashlib.sha256(chunk).digest()).decode()
        return headers

    def url(self, method: str, key: str, headers: dict[str, str]) -> str:
        request = AWSRequest(method, f"{self._root}/{key}", headers=headers)
        S3SigV4QueryAuth(self._credentials, "s3", "us-east-1", expires=3600).add_auth(request)
        return str(request.url)

    def put(self, url: str, headers: dict[str, str], body: memoryview) -> None:
        status = self._http.request("PUT", url, headers=headers, body=body).status
        if status != 200:
            raise RuntimeError(f"a bare PUT was answered {status}")

    def get(self, url: str, headers: dict[str, str], buffer: memoryview) -> None:
        reply = self._http.request("GET", url, headers=headers, preload_content=False, decode_content=False)
        filled = 0
        while filled < buffer.nbytes and (count := reply.readinto(buffer[filled : filled + _BLOCK_BYTES])):
            filled += count
        reply.release_conn()
        if reply.status != 200 or filled < buffer.nbytes:
            raise RuntimeError(f"a bare GET was answered {reply.status} with {filled} of {buffer.nbytes} bytes")

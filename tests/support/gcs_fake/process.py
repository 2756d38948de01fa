"""Starts and stops the fake, and makes what it needs to know: accounts, a key file, buckets."""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import urllib3
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.support.ports import free_ports
from tests.support.processes import ServerProcess

_REPOSITORY = Path(__file__).parents[3]
_DOMAIN = "tests.iam.gserviceaccount.com"


class GcsFake:
    """One server on one folder; `stop` and `start` again stand for an outage.

    Accounts: `service_account` has a key file and may use the buckets; `machine`, that of the metadata server, has
    none, may use the buckets and have Google sign as itself; `stranger` has a key file and may nothing.
    """

    bucket = "holdfast"
    versioned_bucket = "versioned"
    retaining_bucket = "retaining"
    service_account = f"holdfast@{_DOMAIN}"
    machine = f"machine@{_DOMAIN}"
    stranger = f"stranger@{_DOMAIN}"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_ports()
        (folder / "objects").mkdir()
        keys = {email: [_new_key()] for email in (self.service_account, self.stranger)} | {self.machine: []}
        accounts = [
            {
                "email": email,
                "private_keys": [*own, _new_key()],
                "uses_storage": email != self.stranger,
                "signed_for_by": [self.machine] if email == self.machine else [],
            }
            for email, own in keys.items()
        ]
        world = {
            "accounts": accounts,
            "buckets": {self.bucket: False, self.versioned_bucket: True, self.retaining_bucket: False},
            "retaining": [self.retaining_bucket],
            "machine": self.machine,
            "secret": secrets.token_hex(32),
        }
        (folder / "google.json").write_text(json.dumps(world))
        self.key_file = self._write_key_file(self.service_account, keys)
        self.strangers_key_file = self._write_key_file(self.stranger, keys)
        self._process = self._launch()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def store_url_for(self, prefix: str, *, bucket: str = bucket) -> str:
        return f"gs://{bucket}/{prefix}?endpoint={self.endpoint}&iam_endpoint={self.endpoint}"

    @property
    def environment(self) -> dict[str, str]:
        """For a process with the key file."""
        return {"GOOGLE_APPLICATION_CREDENTIALS": str(self.key_file)}

    @property
    def machines_environment(self) -> dict[str, str]:
        """For a process on a machine that has a service account and no key."""
        host = f"127.0.0.1:{self._port}"
        return {"GCE_METADATA_HOST": host, "GCE_METADATA_IP": host, "CLOUDSDK_CONFIG": str(self._folder)}

    def stop(self) -> None:
        self._process.stop(grace_seconds=2)

    def start(self) -> None:
        """The same port and data again."""
        self._process = self._launch()

    def _launch(self) -> ServerProcess:
        return ServerProcess(
            [sys.executable, "-m", "tests.support.gcs_fake.server", str(self._folder), str(self._port)],
            log=self._folder / "google.log",
            ready=self._answers,
            cwd=_REPOSITORY,
        )

    def _answers(self) -> bool:
        try:
            return urllib3.request("GET", self.endpoint, retries=False, timeout=2).status == 403
        except urllib3.exceptions.HTTPError:
            return False

    def _write_key_file(self, email: str, keys: dict[str, list[str]]) -> Path:
        """As Google gives them out."""
        path = self._folder / f"{email}.json"
        key = {
            "type": "service_account",
            "project_id": "tests",
            "private_key_id": secrets.token_hex(20),
            "private_key": keys[email][0],
            "client_email": email,
            "client_id": "1",
            "token_uri": f"{self.endpoint}/token",
        }
        path.write_text(json.dumps(key))
        return path


@contextmanager
def gcs_fake() -> Iterator[GcsFake]:
    """A fresh one; gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-gcs-"))
    try:
        server = GcsFake(folder)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _new_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, pkcs8, plain).decode()

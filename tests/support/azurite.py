"""A real server of Azure's Blob API for the tests: Azurite from npm, which checks signatures, permissions and MD5."""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import urllib3
from azure.core.credentials import AzureNamedKeyCredential
from azure.storage.blob import ContainerClient

from tests.support.ports import free_ports
from tests.support.prepare import prepare
from tests.support.processes import ServerProcess


class Azurite:
    """One server on one data folder; `stop` and `start` again stand for an outage."""

    container = "holdfast"

    def __init__(self, folder: Path, certificate: Path | None) -> None:
        self._folder = folder
        self._program = _azurite()
        self._certificate = certificate
        self._port = free_ports()
        self.endpoint = f"http{'s' if certificate else ''}://127.0.0.1:{self._port}"
        self.account = "test" + secrets.token_hex(6)
        self.key = base64.b64encode(secrets.token_bytes(64)).decode()
        self._process = self._launch()

    @property
    def store_url(self) -> str:
        return self.store_url_for("checkpoints")

    def store_url_for(self, prefix: str, container: str = container) -> str:
        """Without the key: it comes from the environment (`environment`) or is given explicitly."""
        return f"az://{container}/{prefix}?account={self.account}&endpoint={self.endpoint}"

    @property
    def environment(self) -> dict[str, str]:
        return {"AZURE_STORAGE_KEY": self.key}

    @property
    def pid(self) -> int:
        return self._process.pid

    def make_container(self, name: str = container) -> None:
        credential = AzureNamedKeyCredential(self.account, self.key)
        trusted = str(self._certificate) if self._certificate else True
        url = f"{self.endpoint}/{self.account}"
        with ContainerClient(url, name, credential, connection_verify=trusted) as client:
            client.create_container()

    def stop(self) -> None:
        # It waits for kept-alive connections to end; whoever stops it wants it away.
        self._process.stop(grace_seconds=2)

    def start(self) -> None:
        """The same port and data again."""
        self._process = self._launch()

    def _launch(self) -> ServerProcess:
        certificate = str(self._certificate or "")
        command = [
            *("node", str(self._program), "--location", str(self._folder / "data")),
            *("--blobHost", "127.0.0.1", "--blobPort", str(self._port)),
            # Azure's library speaks of newer versions of the protocol than this server has heard of.
            *("--silent", "--skipApiVersionCheck", "--disableTelemetry"),
            *(("--oauth", "basic", "--cert", certificate, "--key", certificate) if certificate else ()),
        ]
        environment = os.environ | {"AZURITE_ACCOUNTS": f"{self.account}:{self.key}", "TMPDIR": str(self._folder)}
        return ServerProcess(
            command, log=self._folder / "azurite.log", ready=self._answers, cwd=self._folder, env=environment
        )

    def _answers(self) -> bool:
        try:
            with urllib3.PoolManager(ca_certs=str(self._certificate) if self._certificate else None) as pool:
                return pool.request("GET", f"{self.endpoint}/", retries=False, timeout=2).status < 500
        except urllib3.exceptions.HTTPError:
            return False


@contextmanager
def azurite_server(certificate: Path | None = None) -> Iterator[Azurite]:
    """A fresh server with the container created; gone afterwards. With a certificate it speaks TLS and takes tokens as
    Entra ID's. NotHereError where it cannot run."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-azure-"))
    try:
        server = Azurite(folder, certificate)
        try:
            server.make_container()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _azurite() -> Path:
    """The server's program, installed if need be."""
    prepare("azurite", "azurite", sys.prefix)
    return Path(sys.prefix) / "azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"

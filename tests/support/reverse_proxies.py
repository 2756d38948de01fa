"""The real nginx with deploy/nginx/nginx.conf, in front of a service of the tests.

Its name, files and addresses are those of the test; nothing else of that file is changed.
"""

from __future__ import annotations

import os
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support.debian import debian_program
from tests.support.ports import free_ports
from tests.support.processes import ServerProcess
from tests.support.tls import Authority

DEPLOYED = Path(__file__).resolve().parents[2] / "deploy" / "nginx" / "nginx.conf"
_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@dataclass(frozen=True)
class Nginx:
    port: int
    folder: Path

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    @property
    def log_text(self) -> str:
        return "".join((self.folder / name).read_text() for name in ("access.log", "error.log"))

    def trusted(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.folder / "authority.pem")

    def http(self, source: str = "127.0.0.1", **options: object) -> httpx.Client:
        """Connects from this address."""
        way = httpx.HTTPTransport(local_address=source, verify=self.trusted())
        return httpx.Client(base_url=self.url, timeout=120, transport=way, **options)  # type: ignore[arg-type]


def deployed_at(folder: Path, upstream: str, port: int) -> Path:
    """A copy of the configuration that listens on this port of loopback."""
    text = DEPLOYED.read_text()
    for deployed, here in (
        ("server holdfast:8400;", f"server {upstream};"),
        ("server_name holdfast.example.org;", "server_name localhost;"),
        ("listen 443 ", f"listen 127.0.0.1:{port} "),
        ("/etc/nginx/holdfast.pem", str(folder / "server.pem")),
        ("/etc/nginx/holdfast.key", str(folder / "server.key")),
        ("/var/log/nginx/access.log", str(folder / "access.log")),
        ("/var/log/nginx/error.log", str(folder / "error.log")),
        ("worker_processes auto;", "worker_processes 1;\ndaemon off;"),
        ("http {\n", "http {\n" + "".join(f"    {each}_temp_path {folder / each};\n" for each in _TEMPORARY)),
    ):
        assert deployed in text, deployed
        text = text.replace(deployed, here)
    if os.geteuid() == 0:
        text = f"user root;\n{text}"  # another user could not enter the test's folder
    path = folder / "nginx.conf"
    path.write_text(f"pid {folder / 'nginx.pid'};\n{text}")
    return path


@contextmanager
def nginx(folder: Path, upstream: str) -> Iterator[Nginx]:
    """In front of the service at `upstream` (host and port); gone afterwards. Raises NotHereError."""
    program = debian_program("nginx", "usr/sbin/nginx")
    libraries = ":".join(str(each) for each in program.parents[2].glob("usr/lib/*"))
    environment = os.environ | {"LD_LIBRARY_PATH": libraries}
    port = free_ports()
    Authority(folder / "authority.pem").sign(folder / "server.pem", folder / "server.key", host="localhost")
    command = [str(program), "-p", str(folder), "-e", "error.log", "-c", str(deployed_at(folder, upstream, port))]
    checked = subprocess.run([*command, "-t"], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stderr
    running = Nginx(port, folder)

    def answers() -> bool:
        try:
            with running.http() as http:
                return http.get("/healthz").status_code == 200
        except httpx.HTTPError:
            return False

    process = ServerProcess(command, log=folder / "nginx.log", ready=answers, cwd=folder, env=environment)
    try:
        yield running
    finally:
        process.stop(grace_seconds=5)

"""The real nginx, Envoy and Traefik with the files of deploy/, in front of a service of the tests.

Names, files and addresses are those of the test; nothing else of those files is changed.
"""

from __future__ import annotations

import os
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support.debian import debian_program
from tests.support.ports import free_ports
from tests.support.prepare import prepare
from tests.support.processes import ServerProcess
from tests.support.tls import Authority

DEPLOYED = Path(__file__).resolve().parents[2] / "deploy"
_NGINX_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@dataclass(frozen=True)
class ReverseProxy:
    port: int
    folder: Path

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    @property
    def log_text(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*.log"))

    def trusted(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.folder / "authority.pem")

    def http(self, source: str = "127.0.0.1", **options: object) -> httpx.Client:
        """Connects from this address."""
        way = httpx.HTTPTransport(local_address=source, verify=self.trusted())
        return httpx.Client(base_url=self.url, timeout=120, transport=way, **options)  # type: ignore[arg-type]


@contextmanager
def reverse_proxy(name: str, folder: Path, upstream: str) -> Iterator[ReverseProxy]:
    """One of COMMANDS, in front of the service at `upstream` (host and port); gone afterwards. Raises NotHereError."""
    running = ReverseProxy(free_ports(), folder)
    Authority(folder / "authority.pem").sign(folder / "server.pem", folder / "server.key", host="localhost")
    command, environment = COMMANDS[name](running, upstream)

    def answers() -> bool:
        try:
            with running.http() as http:
                return http.get("/healthz").status_code == 200
        except httpx.HTTPError:
            return False

    log = folder / f"{name}.log"
    process = ServerProcess(command, log=log, ready=answers, cwd=folder, env=os.environ | environment)
    try:
        yield running
    finally:
        process.stop(grace_seconds=5)


def _nginx(proxy: ReverseProxy, upstream: str) -> tuple[list[str], dict[str, str]]:
    program = debian_program("nginx", "usr/sbin/nginx")
    folder = proxy.folder
    of_this_machine = f"pid {folder / 'nginx.pid'};\ndaemon off;\nworker_processes 1;"
    if os.geteuid() == 0:
        of_this_machine += "\nuser root;"  # another user could not enter the test's folder
    temporary = "".join(f"    {each}_temp_path {folder / each};\n" for each in _NGINX_TEMPORARY)
    _deploy(
        proxy,
        "nginx/nginx.conf",
        ("server holdfast:8400;", f"server {upstream};"),
        ("server_name holdfast.example.org;", "server_name localhost;"),
        ("listen 443 ", f"listen 127.0.0.1:{proxy.port} "),
        ("/var/log/nginx", str(folder)),
        ("worker_processes auto;", of_this_machine),
        ("http {\n", "http {\n" + temporary),
        *_certificate(proxy, "nginx"),
    )
    libraries = ":".join(str(each) for each in program.parents[2].glob("usr/lib/*"))
    command = [str(program), "-p", str(folder), "-e", "error.log", "-c", "nginx.conf"]
    return command, {"LD_LIBRARY_PATH": libraries}


def _envoy(proxy: ReverseProxy, upstream: str) -> tuple[list[str], dict[str, str]]:
    prepare("wheel", "envoy", "envoy", sys.prefix)
    host, _, port = upstream.partition(":")
    _deploy(
        proxy,
        "envoy/envoy.yaml",
        ("{address: holdfast, port_value: 8400}", f"{{address: {host}, port_value: {port}}}"),
        ("{address: 0.0.0.0, port_value: 443}", f"{{address: 127.0.0.1, port_value: {proxy.port}}}"),
        ("holdfast.example.org:443", f"localhost:{proxy.port}"),
        ("holdfast.example.org", "localhost"),
        *_certificate(proxy, "envoy"),
    )
    options = ("--disable-hot-restart", "--concurrency", "1", "--file-flush-interval-msec", "100")
    return [f"{sys.prefix}/envoy/envoy/_bin/envoy", "-c", "envoy.yaml", *options], {}


def _traefik(proxy: ReverseProxy, upstream: str) -> tuple[list[str], dict[str, str]]:
    prepare("wheel", "traefik", "traefik", sys.prefix)
    _deploy(
        proxy,
        "traefik/traefik.yml",
        ('":443"', f"127.0.0.1:{proxy.port}"),
        ("/etc/traefik/holdfast.yml", str(proxy.folder / "holdfast.yml")),
    )
    _deploy(
        proxy,
        "traefik/holdfast.yml",
        ("http://holdfast:8400", f"http://{upstream}"),
        ("holdfast.example.org", "localhost"),
        *_certificate(proxy, "traefik"),
    )
    return [f"{sys.prefix}/traefik/bin/traefik", "--configFile=traefik.yml"], {}


def _certificate(proxy: ReverseProxy, name: str) -> list[tuple[str, str]]:
    return [(f"/etc/{name}/holdfast.{end}", str(proxy.folder / f"server.{end}")) for end in ("pem", "key")]


def _deploy(proxy: ReverseProxy, file: str, *changes: tuple[str, str]) -> None:
    """A copy in the proxy's folder, with what is of this machine."""
    path = DEPLOYED / file
    text = path.read_text()
    for deployed, here in changes:
        assert deployed in text, deployed
        text = text.replace(deployed, here)
    (proxy.folder / path.name).write_text(text)


COMMANDS: dict[str, Callable[[ReverseProxy, str], tuple[list[str], dict[str, str]]]] = {
    "nginx": _nginx,
    "envoy": _envoy,
    "traefik": _traefik,
}

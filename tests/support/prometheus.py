"""The real Prometheus and its promtool: a server with deploy/prometheus/prometheus.yml that scrapes what a test serves.

Every second or few in place of every fifteen, and from the addresses of the test; nothing else of that file is changed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from tests.support.debian import debian_program
from tests.support.ports import free_ports
from tests.support.processes import ServerProcess

DEPLOYED = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"


def promtool(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Raises NotHereError. `text` is its standard input."""
    program = debian_program("prometheus", "usr/bin/promtool")
    return subprocess.run(
        [program, *arguments], input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )


def deployed_at(folder: Path, target: str, token: str, others: Mapping[str, str], *, scrape_seconds: int = 1) -> Path:
    """A copy of deploy/prometheus that scrapes `target` with that token, and `others`: the address of each job.
    `scrape_seconds`: between two scrapes. Prometheus gives up one that takes longer."""
    shutil.copytree(DEPLOYED, folder)
    (folder / "holdfast-token").write_text(token)
    (folder / "targets").mkdir()
    for job, address in others.items():
        (folder / "targets" / f"{job}.yml").write_text(json.dumps([{"targets": [address]}]))
    configuration = folder / "prometheus.yml"
    text = configuration.read_text()
    scrapes = "scrape_interval: 1s", f"scrape_interval: {scrape_seconds}s"
    for deployed, here in (("_interval: 15s", "_interval: 1s"), scrapes, ("holdfast:8400", target)):
        assert deployed in text
        text = text.replace(deployed, here)
    configuration.write_text(text)
    return configuration


class Prometheus:
    """A server that runs."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def ask(self, path: str, **parameters: str) -> Any:
        """`data` of the answer. Raises AssertionError with Prometheus's own words."""
        answer = self._http.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        return answer["data"]

    def query(self, query: str, at: float | None = None) -> list[dict[str, Any]]:
        """The samples of now, or of the moment `at` (seconds since 1970): `metric` has the labels, `value` a time and a
        text. Without those that are not a number, of which a panel shows nothing."""
        found = self.ask("query", query=query, **({} if at is None else {"time": str(at)}))
        assert found["resultType"] == "vector", query
        return [each for each in found["result"] if each["value"][1] != "NaN"]


@contextmanager
def prometheus(configuration: Path, folder: Path) -> Iterator[Prometheus]:
    """Gone afterwards. Raises NotHereError."""
    program = debian_program("prometheus", "usr/bin/prometheus")
    address = f"127.0.0.1:{free_ports()}"
    options = {"config.file": configuration, "storage.tsdb.path": folder / "data", "web.listen-address": address}
    process = ServerProcess(
        [str(program), *(f"--{name}={value}" for name, value in options.items())],
        log=folder / "prometheus.log",
        ready=_answers(f"http://{address}/-/ready"),
        cwd=folder,
    )
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=30) as http:
            yield Prometheus(http)
    finally:
        process.stop(grace_seconds=5)


def _answers(url: str) -> Callable[[], bool]:
    def ask() -> bool:
        try:
            return httpx.get(url, timeout=2).is_success
        except httpx.HTTPError:
            return False

    return ask


@contextmanager
def exporter(text: str) -> Iterator[int]:
    """The port of a little server that answers each scrape with these metrics."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

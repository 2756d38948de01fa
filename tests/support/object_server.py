"""The service's object routes alone, under uvicorn in a process of its own, so that a test may kill it.

python -m tests.support.object_server ROOT PORT SIGNING_KEY_HEX
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import urllib3
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast_service.stores.posix.endpoints import SignedStore, object_router
from holdfast_service.stores.posix.posix_store import PosixStore
from holdfast_service.stores.posix.signed_urls import UrlSigner
from holdfast_service.web.problem_reply import install_problem_replies
from tests.support.ports import free_ports
from tests.support.processes import ServerProcess

_REPOSITORY = Path(__file__).parents[2]


class ObjectServer:
    def __init__(self, root: Path, signing_key: bytes, log: Path) -> None:
        port = free_ports()
        self.url = f"http://127.0.0.1:{port}"
        self.process = ServerProcess(
            [sys.executable, "-m", "tests.support.object_server", str(root), str(port), signing_key.hex()],
            log=log,
            ready=self._answers,
            cwd=_REPOSITORY,
        )

    def _answers(self) -> bool:
        try:
            return urllib3.request("GET", self.url, retries=False, timeout=2).status == 404
        except urllib3.exceptions.HTTPError:
            return False


@contextmanager
def object_server(root: Path, signing_key: bytes, log: Path) -> Iterator[ObjectServer]:
    server = ObjectServer(root, signing_key, log)
    try:
        yield server
    finally:
        server.process.stop()


def _application(root: Path, signing_key: bytes) -> ASGIApp:
    app = FastAPI()
    install_problem_replies(app)
    app.include_router(object_router([SignedStore(PosixStore(root, UrlSigner(signing_key)), signing_key)]))

    async def with_request_id(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["request_id"] = "test"
        await app(scope, receive, send)

    return with_request_id


if __name__ == "__main__":
    folder, listen_port, key = sys.argv[1:]
    uvicorn.run(
        _application(Path(folder), bytes.fromhex(key)), host="127.0.0.1", port=int(listen_port), access_log=False
    )

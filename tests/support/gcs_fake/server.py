"""The process: one port for all of Google's services that the store talks to.

python -m tests.support.gcs_fake.server FOLDER PORT, with FOLDER/google.json as process.py writes it
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import uvicorn
from starlette.types import Receive, Scope, Send

from tests.support.gcs_fake import identity_api
from tests.support.gcs_fake.accounts import Account, Accounts
from tests.support.gcs_fake.json_api import JsonApi
from tests.support.gcs_fake.objects import Objects
from tests.support.gcs_fake.replies import Refusal, Reply
from tests.support.gcs_fake.requests import BodyCutOff, Request
from tests.support.gcs_fake.xml_api import XmlApi

_PIECE_BYTES = 1024 * 1024


class FakeGoogle:
    """An ASGI application."""

    def __init__(self, folder: Path) -> None:
        world = json.loads((folder / "google.json").read_text())
        self._machine: str = world["machine"]
        self._accounts = Accounts([Account(**each) for each in world["accounts"]], bytes.fromhex(world["secret"]))
        self._objects = Objects(folder / "objects", world["buckets"], world["retaining"])
        self._json = JsonApi(self._accounts, self._objects)
        self._xml = XmlApi(self._accounts, self._objects)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request.of(scope, receive)
        part: range | None = None
        try:
            try:
                reply = await self._of_another_service(request)
                if reply is None:
                    reply, part = await self._xml.answer(request)
            except Refusal as refusal:
                await request.drain()
                reply = refusal.as_json() if self._json.speaks(request) else refusal.as_xml()
        except BodyCutOff:
            return
        await self._send(reply, part, send)

    async def _of_another_service(self, request: Request) -> Reply | None:
        if request.method == "POST" and request.path == "/token":
            return identity_api.token(self._accounts, await request.body())
        if request.path == "/" or request.path.startswith("/computeMetadata/"):
            return identity_api.metadata(
                self._accounts, self._machine, request.path, request.raw_query, request.headers
            )
        if request.method == "POST" and request.path.endswith(":signBlob"):
            return identity_api.sign_blob(self._accounts, request.path, request.headers, await request.body())
        if self._json.speaks(request):
            return await self._json.answer(request)
        return None

    async def _send(self, reply: Reply, part: range | None, send: Send) -> None:
        headers = {"content-length": str(len(reply.body)), **reply.headers}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": reply.status, "headers": encoded})
        if part is not None:
            with self._objects.body(int(reply.headers["x-goog-generation"])).open("rb") as file:
                file.seek(part.start)
                for start in range(part.start, part.stop, _PIECE_BYTES):
                    piece = file.read(min(_PIECE_BYTES, part.stop - start))
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": reply.body})


if __name__ == "__main__":
    # Without its own Server header and log of URLs: they are secrets here as anywhere.
    uvicorn.run(
        FakeGoogle(Path(sys.argv[1])),
        host="127.0.0.1",
        port=int(sys.argv[2]),
        access_log=False,
        server_header=False,
        lifespan="off",
    )

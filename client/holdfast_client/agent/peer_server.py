"""Where agents of other hosts, and ranks of their jobs, reach this agent: HTTP (peer_http.py), with this agent's token.

    GET  /chunks/<digest>  the bytes, from the memory that they lie in; 404, or 503 if very many ask at once
    POST /find             Find -> Found
    POST /offers           Offer -> 204; it is copied later, or not

The token is 256 random bits. It travels from rank to rank with the collectives of a job. An agent that is started anew
at the same socket keeps the address and the token, so the job's other hosts still find it. Bytes are proven by those
who read them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus

from pydantic import ValidationError

from holdfast_client.agent.memory_tier import MemoryTier
from holdfast_client.agent.messages import Find, Found, Offer
from holdfast_client.agent.peer_chunks import FIND, OFFERS
from holdfast_client.chunks.peer_http import CHUNKS, Head, PeerAddress, PeerListener, PeerRequest, read_body
from holdfast_protocol.base import RunName

log = logging.getLogger("holdfast.agent")

_MOST_QUESTION_BYTES = 64 * 1024**2
_MOST_REQUESTS = 256
"""Answered at once; others wait in the system's queue."""
_SENDS_UP_TO = _MOST_REQUESTS * 7 // 8
"""With more requests than this it sends no chunk, so that the next one that asks does not take it for dead."""


class PeerServer:
    """Answers from its construction on, on threads of its own. Raises OSError if it cannot listen there, and
    RuntimeError if the system gives no thread."""

    def __init__(
        self, host: str, tier: MemoryTier, on_offer: Callable[[Offer], None], earlier: PeerAddress | None = None
    ) -> None:
        """`host`, `earlier`: as a PeerListener's."""
        self.tier = tier
        self.on_offer = on_offer
        self._listener = _Listener(host, self, earlier)
        self.address = self._listener.address
        self._listener.begin("holdfast-agent-peers")

    def close(self) -> None:
        """Requests that run are cut off."""
        self._listener.end()


class _Listener(PeerListener):
    def __init__(self, host: str, peer: PeerServer, earlier: PeerAddress | None) -> None:
        self.peer = peer
        super().__init__(host, _Request, most=_MOST_REQUESTS, earlier=earlier)


class _Request(PeerRequest):
    server: _Listener

    def answer(self, method: str, path: str, head: Head) -> None:
        if method == "GET" and path.startswith(CHUNKS):
            self._give(path.removeprefix(CHUNKS))
        elif method == "POST" and path in (FIND, OFFERS):
            body = read_body(self.request, head, _MOST_QUESTION_BYTES)
            try:
                self._hear(path, body)
            except ValidationError as error:
                why = error.errors()[0]["msg"]
                log.warning("an agent of another host says what this version does not know: %s", why)
                self.say(HTTPStatus.BAD_REQUEST)
        else:
            self.say(HTTPStatus.NOT_FOUND)

    def _give(self, digest: str) -> None:
        if self.server.requests > _SENDS_UP_TO:
            self.say(HTTPStatus.SERVICE_UNAVAILABLE)
            return
        with self.server.peer.tier.opened(digest) as found:
            if found is None:
                self.say(HTTPStatus.NOT_FOUND)
            elif isinstance(found, bytes):
                self.say(HTTPStatus.OK, len(found))
                self.send_body(found)
            else:
                descriptor, chunk = found
                self.say(HTTPStatus.OK, chunk.bytes)
                self.send_range(descriptor, chunk.start, chunk.bytes)

    def _hear(self, path: str, body: bytes) -> None:
        peer = self.server.peer
        if path == OFFERS:
            peer.on_offer(Offer.model_validate_json(body))
            self.say(HTTPStatus.NO_CONTENT)
            return
        asked = Find.model_validate_json(body)
        sizes = peer.tier.sizes(RunName(asked.project, asked.run), asked.digests)
        answer = Found(bytes=sizes).model_dump_json().encode()
        self.say(HTTPStatus.OK, len(answer))
        self.send_body(answer)

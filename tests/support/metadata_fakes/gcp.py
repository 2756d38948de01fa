"""Google's metadata server: two keys of the instance, with ETags and with answers that are held back."""

from __future__ import annotations

import threading

from tests.support.scripted_http import Reply, Seen

FLAVOR = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}


class FakeGcp:
    def __init__(self) -> None:
        self.refused: list[str] = []
        self.held_back = 0
        self.flavor = dict(FLAVOR)
        self._values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self._versions = dict.fromkeys(self._values, 1)
        self._changed = threading.Condition()
        self._ended = False

    def preempt(self) -> None:
        self._set("preempted", "TRUE")

    def maintain(self, event: str) -> None:
        self._set("maintenance-event", event)

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def answer(self, seen: Seen) -> Reply:
        refusal = self._refusal(seen)
        if refusal is not None:
            self.refused.append(f"{refusal.status} {seen.method} {seen.path}")
            return refusal
        key = seen.path.rpartition("/")[2]
        with self._changed:
            if seen.query.get("wait_for_change") == "true":
                known = seen.query.get("last_etag", self._etag(key))
                seconds = float(seen.query.get("timeout_sec", "60"))
                self.held_back += known == self._etag(key)
                self._changed.wait_for(lambda: self._ended or self._etag(key) != known, seconds)
            body, etag = self._values[key].encode(), self._etag(key)
        return Reply(200, body, {"Content-Type": "application/text", "ETag": etag, **self.flavor}, protocol=None)

    def _refusal(self, seen: Seen) -> Reply | None:
        if seen.headers.get("metadata-flavor") != "Google":
            return Reply(403, b"Missing Metadata-Flavor:Google header.", FLAVOR, protocol=None)
        if "x-forwarded-for" in seen.headers:
            return Reply(403, b"", FLAVOR, protocol=None)
        if seen.method != "GET":
            return Reply(405, b"", FLAVOR, protocol=None)
        folder, _, key = seen.path.rpartition("/")
        if folder != "/computeMetadata/v1/instance" or key not in self._values:
            return Reply(404, b"", FLAVOR, protocol=None)
        return None

    def _etag(self, key: str) -> str:
        return f"{self._versions[key]:016x}"

    def _set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._versions[key] += 1
            self._changed.notify_all()

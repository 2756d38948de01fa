"""The open connections of a pool, so that they can be cut while threads wait in them.

A thread that sends to a store which does not take the bytes looks at no stop event before the time-out. Closing a pool
closes only what is idle in it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool


class LiveConnections:
    """Of one PoolManager, which makes its connections through this from here on."""

    def __init__(self, manager: urllib3.PoolManager) -> None:
        live: weakref.WeakSet[HTTPConnection] = weakref.WeakSet()
        lock = threading.Lock()
        self._live, self._lock = live, lock

        class Plain(HTTPConnection):
            def connect(self) -> None:
                super().connect()
                with lock:
                    live.add(self)

        class Secure(HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                with lock:
                    live.add(self)

        class PlainPool(HTTPConnectionPool):
            ConnectionCls = Plain

        class SecurePool(HTTPSConnectionPool):
            ConnectionCls = Secure

        manager.pool_classes_by_scheme = {"http": PlainPool, "https": SecurePool}

    def cut(self) -> None:
        """Whoever waits in one of them gets an error at once. Idle ones are found dead when they are used next, and
        made anew. From any thread."""
        with self._lock:
            open_sockets = [connection.sock for connection in self._live if connection.sock is not None]
        for each in open_sockets:
            # Not a TLS socket's own: that one lets go of its keys first, and what is sent meanwhile goes out as it is.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)

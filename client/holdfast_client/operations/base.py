"""What each group of operations stands on: the one transport."""

from __future__ import annotations

from holdfast_client.transport import Transport


class Operations:
    """A group of operations. They differ in route, request and reply, and in nothing else."""

    transport: Transport

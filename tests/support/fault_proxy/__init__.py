"""A real HTTP proxy on loopback that does to a connection what networks, gateways and stores do on a bad day.

    with fault_proxy(service_port) as proxy:
        proxy.script(DropReply(), on="seal", times=2)

`faults` says what can go wrong, `calls` which call of the protocol a request is, `proxy` carries it out.
"""

from tests.support.fault_proxy.faults import (
    BAD_GATEWAY,
    INTERNAL_ERROR,
    SLOW_DOWN,
    TOO_MANY_REQUESTS,
    Answer,
    BlackHole,
    CutBefore,
    CutReply,
    CutRequest,
    Delay,
    DropReply,
    Fault,
    Garble,
    Held,
    Throttle,
)
from tests.support.fault_proxy.proxy import FaultProxy, Seen, fault_proxy

__all__ = [
    "BAD_GATEWAY",
    "INTERNAL_ERROR",
    "SLOW_DOWN",
    "TOO_MANY_REQUESTS",
    "Answer",
    "BlackHole",
    "CutBefore",
    "CutReply",
    "CutRequest",
    "Delay",
    "DropReply",
    "Fault",
    "FaultProxy",
    "Garble",
    "Held",
    "Seen",
    "Throttle",
    "fault_proxy",
]

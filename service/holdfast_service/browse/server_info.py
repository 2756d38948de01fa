"""What the service tells a client about itself and about the client's own token."""

from __future__ import annotations

from holdfast_protocol.codecs import Codec
from holdfast_protocol.server import ServerInfo
from holdfast_protocol.version import PROTOCOL_VERSION
from holdfast_service.auth.principal import Principal
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.release import VERSION


def server_info(context: ServiceContext, caller: Principal) -> ServerInfo:
    capabilities = context.store.capabilities
    with context.database.read() as session:
        now = database_now(session)
    return ServerInfo(
        version=VERSION,
        protocol=PROTOCOL_VERSION,
        catalog_id=context.catalog_id,
        epoch=context.epoch,
        now=now,
        store_kind=context.store.kind,
        codecs=[codec.value for codec in Codec],
        store_asks_md5=capabilities is not None and capabilities.asks_md5,
        token_name=caller.name,
        token_project=caller.project_name,
        token_scopes=sorted(caller.scopes),
    )

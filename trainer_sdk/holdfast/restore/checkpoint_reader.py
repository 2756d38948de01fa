"""The chunks of one committed checkpoint as one rank reads them, and what all ranks share: its documents, and chunks
that are passed on within a host and between the hosts. holdfast_client/chunks/documents.py proves the documents.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.distributed.ranks import Ranks
from holdfast.layout.plan import ChunkSizes
from holdfast.layout.reshard import Read, ReadPlan, Room, Wants, scatter, share_out, straight, wanted_bits
from holdfast.settings import TrainerSettings
from holdfast.state.components import generators_alike
from holdfast.state.load import StoredState
from holdfast_client.agent.lent_chunks import LentChunks
from holdfast_client.agent.link import NodeAgent
from holdfast_client.chunks.documents import CheckpointDocuments, ChunkLists
from holdfast_client.chunks.host_chunks import HostChunks
from holdfast_client.chunks.peer_http import PeerAddress
from holdfast_client.chunks.peers import Peers, PeerServer, address_towards
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.errors import (
    CheckpointCold,
    CheckpointNotFound,
    ChunkGone,
    ChunkNotFound,
    HoldfastError,
    IntegrityError,
)
from holdfast_client.local.chunk_folder import ChunkFolder
from holdfast_client.local.private_folder import job_folder_in_use, new_job_folder
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import Manifest
from holdfast_protocol.index_documents import Layout, SavedAs, ShardIndex
from holdfast_protocol.restores import RestorePoint
from holdfast_protocol.states import StoreRole

log = logging.getLogger("holdfast")

DAMAGED = (IntegrityError, ChunkGone, ChunkNotFound, CheckpointNotFound, CheckpointCold)
"""The checkpoint is at fault, so an earlier one may do. Any other error would also meet the earlier one."""

DEFAULT_CACHE_BYTES = 16 * 1024**3
PART_OF_FREE_DISK = 4


@dataclass(frozen=True)
class SharedReads:
    """The chunks that one rank fetches, and with which ranks: `order` has each digest that it wants once."""

    host: HostChunks
    order: tuple[str, ...]


@dataclass(frozen=True)
class _Offer:
    """One rank's message to the others. Only the leader of a host sets `folder`: where, and how many bytes may lie
    there. `address`: where the rank passes chunks on to other hosts."""

    wants: Wants
    folder: tuple[Path, int] | None
    address: PeerAddress | None


class HostSharing:
    """The ranks of one host fetch each chunk that several of them want once, and with HOLDFAST_SWARM so do the hosts of
    the job. Between the plan of a load and its reading.

        each rank: the digests it wants, and where it passes them on; the host's leader: a folder
            -> [gathered] -> layout/reshard.py -> HostChunks, Peers

    A job without two ranks on a host, and with no rank that swarms, needs no collective, folder or file for it.

    `local`: the chunk folder that this host has anyway, its local tier; used in place of a folder for the restore.
    `agent`: the host's, whose memory is read before any folder. Other hosts' agents come before the store."""

    def __init__(
        self,
        ranks: Ranks,
        settings: TrainerSettings,
        client: Client,
        *,
        local: ChunkFolder | None = None,
        agent: NodeAgent | None = None,
    ) -> None:
        self._ranks = ranks
        self._settings = settings
        has_hosts = len(set(ranks.host_leaders)) > 1 and (local is not None or settings.cache_bytes != 0)
        self._swarms = settings.swarm and has_hosts and client.settings.max_bytes_per_second is None
        self._local = local
        self._agent = agent

    @contextmanager
    def on_host(self) -> Iterator[HostChunks | None]:
        """What is on this host before the restore, and with other hosts' agents; None if it has neither agent nor
        local tier. For the block in which this rank reads."""
        lent = None if self._agent is None else self._agent.borrow()
        agents = None if self._agent is None else self._agent.of_other_hosts()
        try:
            if lent is None and agents is None and self._local is None:
                yield None
            else:
                yield HostChunks(self._local, (), lent=lent, agents=agents)
        finally:
            if lent is not None:
                lent.close()

    @contextmanager
    def of(
        self,
        reads: ReadPlan,
        chunks: Mapping[int, Sequence[str]],
        late: Collection[str] = (),
        *,
        on_host: HostChunks | None = None,
    ) -> Iterator[SharedReads | None]:
        """For the block in which this rank reads; the folder is deleted afterwards. None if it shares with no other
        rank, and has no `on_host`, of this. What the agent has lent is shared with nobody. `late`: the tensors that it
        reads last, as `part_reads` takes them. Collective at its beginning; all ranks must have ended their reading
        before the leader leaves the block."""
        wanted = _digests(reads, chunks)
        lent, agents = (None, None) if on_host is None else (on_host.lent, on_host.agents)
        alone = None if on_host is None else SharedReads(HostChunks(self._local, (), lent=lent, agents=agents), wanted)
        if agents is not None:
            agents.find(_missing(reads, chunks, _not_lent(wanted, lent)))
        with ExitStack() as stack:
            if not self._ranks.some_share:
                yield alone
                return
            universe = tuple(dict.fromkeys(digest for rank in sorted(chunks) for digest in chunks[rank]))
            server = self._server()
            first = () if server is None else _digests(part_reads(reads, chunks, late)[0], chunks)
            wants = Wants(
                all=wanted_bits(universe, _not_lent(wanted, lent)),
                first=b"" if server is None else wanted_bits(universe, _not_lent(first, lent)),
                serves=server is not None,
            )
            try:
                offer = _Offer(wants, self._offer_folder(stack), None if server is None else server.address)
                offers = self._ranks.gather(offer)
                folder = self._folder(stack, offers[self._ranks.host_leader].folder)
            finally:
                if server is not None:
                    stack.callback(server.close)  # before the folder that it reads from
            if folder is None:
                if server is not None:
                    server.begin(None, ())
                yield alone
                return
            share = share_out(
                universe,
                [each.wants for each in offers],
                self._ranks.host_leaders,
                self._ranks.rank,
                wanted,
                transfers=self._settings.transfers,
                room=folder.limit_bytes // ChunkSizes.cut_bytes // 2,  # not all ranks are in the same window
            )
            peers = None
            if server is not None:
                server.begin(folder, share.owned)
                addresses = {digest: offers[rank].address for digest, rank in share.owners.items()}
                peers = Peers({digest: each for digest, each in addresses.items() if each is not None}, server)
            yield SharedReads(HostChunks(folder, share.shared, peers, lent, agents), share.order)

    def _server(self) -> PeerServer | None:
        """None if this rank passes nothing on to other hosts, and takes nothing from them."""
        if not self._swarms:
            return None
        address = self._settings.swarm_address or address_towards(os.environ.get("MASTER_ADDR"))
        try:
            if address is None:
                raise OSError("this machine has no address that others reach; HOLDFAST_SWARM_ADDRESS can name one")
            return PeerServer(address)
        except (OSError, RuntimeError) as error:
            log.warning("rank %d shares no chunks with other hosts: %s", self._ranks.rank, error)
            return None

    def _offer_folder(self, stack: ExitStack) -> tuple[Path, int] | None:
        """The host's leader makes one, unless there is a local tier, or nobody to share with."""
        alone = len(self._ranks.host_ranks) == 1 and not self._swarms
        limit = self._settings.cache_bytes
        if self._local is not None or alone or limit == 0 or self._ranks.rank != self._ranks.host_leader:
            return None
        where = self._settings.cache_dir
        try:
            where = where or Path(tempfile.gettempdir())
            folder = stack.enter_context(new_job_folder(where))
            free = shutil.disk_usage(folder).free // PART_OF_FREE_DISK
        except (OSError, HoldfastError) as error:
            unusable = where or "the temporary folder"
            log.warning("the ranks of this host fetch each for itself, as %s is not usable: %s", unusable, error)
            return None
        return folder, min(DEFAULT_CACHE_BYTES, free) if limit is None else limit

    def _folder(self, stack: ExitStack, offered: tuple[Path, int] | None) -> ChunkFolder | None:
        if self._local is not None:
            return self._local
        if offered is None:
            return None
        path, limit_bytes = offered
        try:
            stack.enter_context(job_folder_in_use(path))
            folder = ChunkFolder(path, limit_bytes=limit_bytes)
        except (OSError, HoldfastError) as error:
            # For example containers that share a hostname but no disk.
            log.info("rank %d fetches for itself, as %s is not usable: %s", self._ranks.rank, path, error)
            return None
        stack.callback(folder.close)
        return folder


def _digests(reads: ReadPlan, chunks: ChunkLists) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chunks[rank][ordinal] for rank, ordinal in reads.by_chunk))


def _not_lent(digests: Iterable[str], lent: LentChunks | None) -> frozenset[str]:
    return frozenset(digest for digest in digests if lent is None or lent.size(digest) is None)


def _missing(reads: ReadPlan, chunks: ChunkLists, digests: Collection[str]) -> dict[int, set[str]]:
    """These digests by the stored ranks whose chunks they are."""
    missing: dict[int, set[str]] = defaultdict(set)
    for rank, ordinal in reads.by_chunk:
        if (digest := chunks[rank][ordinal]) in digests:
            missing[rank].add(digest)
    return missing


def part_reads(reads: ReadPlan, chunks: ChunkLists, late: Collection[str]) -> tuple[ReadPlan, ReadPlan]:
    """The chunks with any tensor that is not `late`, and those with none. Chunks of equal bytes are read at once."""
    first_digests = {
        chunks[rank][ordinal]
        for (rank, ordinal), of_chunk in reads.by_chunk.items()
        if any(read.name not in late for read in of_chunk)
    }
    first: dict[tuple[int, int], tuple[Read, ...]] = {}
    rest: dict[tuple[int, int], tuple[Read, ...]] = {}
    for (rank, ordinal), of_chunk in reads.by_chunk.items():
        (first if chunks[rank][ordinal] in first_digests else rest)[rank, ordinal] = of_chunk
    return ReadPlan(first), ReadPlan(rest)


def chunk_sizes(reads: ReadPlan, layout: Layout, chunks: ChunkLists) -> dict[str, int]:
    """Digest -> bytes of each chunk that is read, as the layout says."""
    return {chunks[rank][ordinal]: layout.shards[rank].chunks[ordinal] for rank, ordinal in reads.by_chunk}


class CheckpointSource(CheckpointDocuments):
    """Keep it open while reading: it holds a lease, and the service deletes nothing that a lease protects."""

    def __init__(
        self,
        client: Client,
        run: RunName,
        point: RestorePoint,
        *,
        workers: TransferWorkers,
        host: HostChunks | None = None,
    ) -> None:
        """`run` and `point`: the request and the service's choice; the checkpoint must match both. `host`: is searched
        for documents first."""
        super().__init__(
            client,
            point.checkpoint_id,
            SavedAs(str(run), point.step, point.world_size),
            point.digest,
            workers=workers,
            host=host,
        )

    def read(
        self,
        reads: ReadPlan,
        layout: Layout,
        chunks: ChunkLists,
        rooms: Mapping[str, Room],
        *,
        shared: SharedReads | None = None,
        on_bytes: Callable[[int], object] | None = None,
    ) -> int:
        """Fetches each chunk that the reads touch once, puts the wanted bytes into `rooms`, by wanted name, and returns
        the number of bytes read. A chunk that is one run of host memory arrives there directly; others are copied from
        one buffer per thread. The contents are unproven until this returns: it checks every digest.

        `shared`: from `HostSharing`, for these reads and others. `on_bytes` is called on the transfer threads with the
        bytes of each verified chunk.
        """
        by_digest: dict[str, list[Read]] = defaultdict(list)
        for (rank, ordinal), of_chunk in reads.by_chunk.items():
            by_digest[chunks[rank][ordinal]].extend(of_chunk)
        in_place = {
            digest: room[run.offset : run.offset + run.bytes]
            for digest, of_chunk in by_digest.items()
            if (run := straight(of_chunk)) is not None and isinstance(room := rooms[run.name], memoryview)
        }
        sizes = chunk_sizes(reads, layout, chunks)
        fetched: list[int] = []
        lock = threading.Lock()

        def receive(digest: str, chunk: memoryview) -> None:
            if chunk is not in_place.get(digest):
                for read in by_digest[digest]:
                    scatter(read, chunk, rooms[read.name])
            with lock:
                fetched.append(chunk.nbytes)
            if on_bytes is not None:
                on_bytes(chunk.nbytes)

        if shared is None:
            self._fetcher.fetch(by_digest, receive, in_place, sizes=sizes)
        else:
            order = [digest for digest in shared.order if digest in by_digest]
            try:
                self._fetcher.fetch(order, receive, in_place, shared.host, sizes=sizes)
            except BaseException:
                shared.host.give_up()
                raise
        return sum(fetched)

    def stop(self) -> None:
        """From any thread: reading ends with TransferStopped, within a block or a socket's time-out."""
        self._fetcher.stop()

    @property
    def bytes_from(self) -> dict[StoreRole, int]:
        """Bytes fetched by ticket, by the store that gave them."""
        return self._fetcher.bytes_from


@dataclass(frozen=True)
class SharedDocuments:
    """Facts of a checkpoint that every rank needs before it reads tensors; read once and shared between the ranks.

    Rank 0 reads manifest, layout and its index, and sends them to all. Other indexes and the chunk lists are divided:
    each rank reads its share. The ranks exchange the lists and, on another world size, the indexes. So N ranks make N
    requests, not N times N (rule one-layout-per-plan)."""

    manifest: Manifest
    stored: StoredState
    chunks: Mapping[int, Sequence[str]]
    """Stored rank -> the digests of its chunks, by ordinal."""
    rng: Any
    """This rank's random number generators; None on another world size, because no rank's fit."""
    alike: frozenset[str]
    """On another world size: the generators whose states were equal on all ranks."""

    @property
    def layout(self) -> Layout:
        return self.stored.layout


def read_documents(ranks: Ranks, source: CheckpointSource, *, rank_trees: bool) -> SharedDocuments:
    """Collective. All ranks get the same documents (except `rng`), or all raise the error of the lowest failing rank.

    `rank_trees`: also each rank's own values; without it only those that all ranks share.
    """
    manifest, layout_bytes, first_index = ranks.from_first(lambda: _read_first(source))
    layout = source.layout(manifest, layout_bytes)
    same_world = layout.world_size == ranks.world_size
    mine = range(ranks.rank, layout.world_size, ranks.world_size)
    own: dict[int, ShardIndex] = {}

    def read_share() -> tuple[dict[int, list[str]], dict[int, ShardIndex]]:
        # Rank 0's index came with the layout. The indexes before the chunk lists, which may come along with them.
        others = [rank for rank in mine if rank != 0]
        read = source.indexes(manifest, others) if rank_trees and others else {}
        own.update(read)
        # Here, where every rank hears of it: a rank that leaves alone meets the others in another collective.
        for index in (first_index, *read.values()):
            if index.layout_digest != layout.digest:
                raise IntegrityError(f"The index of rank {index.rank} in {source.checkpoint_id} names another layout")
        return {rank: source.chunk_list(manifest, layout, rank) for rank in mine}, {} if same_world else read

    shares = ranks.together(read_share)
    chunks = {rank: digests for share in shares for rank, digests in share[0].items()}
    indexes = own if same_world else {rank: index for share in shares for rank, index in share[1].items()}
    if rank_trees and (ranks.is_first or not same_world):
        indexes[0] = first_index
    return SharedDocuments(
        manifest=manifest,
        stored=StoredState(
            layout=layout,
            replicated_trees=first_index.replicated_trees,
            rank_trees={rank: index.trees for rank, index in indexes.items()},
        ),
        chunks=chunks,
        rng=indexes[ranks.rank].rng if rank_trees and same_world else None,
        alike=generators_alike([indexes[rank].rng for rank in range(layout.world_size)])
        if rank_trees and not same_world
        else frozenset(),
    )


def _read_first(source: CheckpointSource) -> tuple[Manifest, bytes, ShardIndex]:
    manifest = source.manifest()
    layout, index = source.first_documents(manifest)
    return manifest, layout, index

"""The ranks of one host fetch each chunk that several of them want once. Between the plan of a load and its reading.

    each rank: which chunks it wants, the host's leader: a folder -> [gathered] -> host_shares.py -> HostChunks

Nothing of it where no host has two ranks: no collective, no folder, no file.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.layout.host_shares import share_out, wanted_bits
from holdfast.layout.reshard import ReadPlan
from holdfast.ranks import Ranks
from holdfast.settings import TrainerSettings
from holdfast_client.chunks.host_chunks import HostChunks
from holdfast_client.errors import HoldfastError
from holdfast_client.local.chunk_folder import ChunkFolder
from holdfast_client.local.job_folder import job_folder_in_use, new_job_folder

log = logging.getLogger("holdfast")

DEFAULT_CACHE_BYTES = 16 * 1024**3
PART_OF_FREE_DISK = 4


@dataclass(frozen=True)
class SharedReads:
    """What one rank fetches, and with whom: `order` has each digest that it wants once."""

    host: HostChunks
    order: tuple[str, ...]


@dataclass(frozen=True)
class _Offer:
    """What a rank tells the others. `folder` only the leader of a host: where, and how much may lie there."""

    wanted: bytes
    folder: tuple[Path, int] | None


class HostSharing:
    """`local`: the chunk folder that this host keeps anyway, its local tier; used in place of one for the restore."""

    def __init__(self, ranks: Ranks, settings: TrainerSettings, *, local: ChunkFolder | None = None) -> None:
        self._ranks = ranks
        self._settings = settings
        self.local = local

    @contextmanager
    def of(self, reads: ReadPlan, chunks: Mapping[int, Sequence[str]]) -> Iterator[SharedReads | None]:
        """For the block in which this rank reads; the folder is gone afterwards. None where there is nobody to share
        with. Collective at its beginning; all ranks must have ended their reading before the leader leaves the block.
        """
        wanted = tuple(dict.fromkeys(chunks[rank][ordinal] for rank, ordinal in reads.by_chunk))
        with ExitStack() as stack:
            if not self._ranks.some_share_a_host:
                yield None if self.local is None else SharedReads(HostChunks(self.local, ()), wanted)
                return
            universe = tuple(dict.fromkeys(digest for rank in sorted(chunks) for digest in chunks[rank]))
            offer = _Offer(wanted_bits(universe, frozenset(wanted)), self._offer_folder(stack))
            offers = self._ranks.gather(offer)
            folder = self._folder(stack, offers[self._ranks.host_leader].folder)
            if folder is None:
                yield None
                return
            share = share_out(
                universe,
                {rank: offers[rank].wanted for rank in self._ranks.host_ranks},
                self._ranks.rank,
                wanted,
                window=self._settings.transfers * len(self._ranks.host_ranks),
            )
            yield SharedReads(HostChunks(folder, share.shared), share.order)

    def _offer_folder(self, stack: ExitStack) -> tuple[Path, int] | None:
        """The host's leader makes one, unless there is a local tier, or it is alone there."""
        alone = len(self._ranks.host_ranks) == 1
        limit = self._settings.cache_bytes
        if self.local is not None or alone or limit == 0 or self._ranks.rank != self._ranks.host_leader:
            return None
        where = self._settings.cache_dir or Path(tempfile.gettempdir())
        try:
            folder = stack.enter_context(new_job_folder(where))
            free = shutil.disk_usage(folder).free // PART_OF_FREE_DISK
        except (OSError, HoldfastError) as error:
            log.warning("the ranks of this host fetch each for itself, as %s is not usable: %s", where, error)
            return None
        return folder, min(DEFAULT_CACHE_BYTES, free) if limit is None else limit

    def _folder(self, stack: ExitStack, offered: tuple[Path, int] | None) -> ChunkFolder | None:
        if self.local is not None:
            return self.local
        if offered is None:
            return None
        path, limit_bytes = offered
        try:
            stack.enter_context(job_folder_in_use(path))
            folder = ChunkFolder(path, limit_bytes=limit_bytes)
        except (OSError, HoldfastError) as error:
            # As in containers that have a host's name in common, and not its disk.
            log.info("rank %d fetches for itself, as %s is not usable: %s", self._ranks.rank, path, error)
            return None
        stack.callback(folder.close)
        return folder

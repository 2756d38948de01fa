"""What a lost host's agent had not sent yet: sealed from the copies that this agent holds (ADR 0099).

The ranks of this node are dead, or a new launch is about to open its attempt -> begin -> does the agent of that host
have them still? then it does this itself -> else a HeldSave of each part, in the name of a rank of this node
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast_client.agent.held_save import HeldSave, JobHere, Ledger, RankClient
from holdfast_client.agent.memory_tier import MemoryTier, Part
from holdfast_client.agent.messages import Find, Found
from holdfast_client.agent.peer_chunks import FIND, TROUBLE, ask
from holdfast_client.chunks.peer_http import PeerAddress
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings
from holdfast_protocol.base import RunName

log = logging.getLogger("holdfast.agent")


@dataclass
class _Means:
    """What the saves of one `begin` share. The last one closes it."""

    client: RankClient
    workers: TransferWorkers
    job: JobHere
    members: int

    def close(self) -> None:
        self.workers.close()
        self.client.close()
        self.job.close()


class LostHosts:
    """Thread-safe."""

    def __init__(self, tier: MemoryTier) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._saves: list[tuple[Part, HeldSave]] = []
        self._is_over = False

    def begin(self, run: RunName, settings: ClientSettings, transfers: int, ledger: Ledger) -> None:
        """Goes on in threads of its own, all parts at once: each waits for the commit, and so for the others. Takes a
        moment for each host that does not answer. `settings`: of a rank of this node, in whose name it is done."""
        parts = self._tier.unfinished(run)
        lost = {id(part) for source in {part.source for part in parts} if source for part in _lost(source, parts, run)}
        with self._lock:
            under_way = {id(part) for part, _ in self._saves}
            mine = [part for part in parts if id(part) in lost - under_way]
            if not mine or self._is_over:
                return
            means = _Means(
                RankClient(Client(settings)),
                TransferWorkers(transfers),
                JobHere(Client(settings), host_ranks=1),
                len(mine),
            )
            made = [(part, _save_of(part, means, ledger)) for part in mine]
            self._saves.extend(made)
        for part, save in made:
            log.warning("the agent of another host is gone, and its save is finished here: %s", save)
            name = "holdfast-agent-lost-host"
            threading.Thread(target=self._finish, args=(part, save, means), name=name, daemon=True).start()

    def is_sealing(self, run: RunName) -> bool:
        """Whether something of the run can still be cut off by a new attempt."""
        with self._lock:
            saves = [save for _, save in self._saves if save.hand.run_name == run]
        return not all(save.is_sealed or save.is_over for save in saves)

    def close(self) -> None:
        """Cuts off what is under way. Does not wait for it."""
        with self._lock:
            self._is_over = True
            saves = [save for _, save in self._saves]
        for save in saves:
            save.stop()

    def _finish(self, part: Part, save: HeldSave, means: _Means) -> None:
        try:
            save.finish()
            if save.is_committed:
                self._tier.confirm(part.hand, part.of_host, part.digests)
            elif save.is_hopeless:
                self._tier.give_up(part)
        finally:
            with self._lock:
                self._saves = [other for other in self._saves if other[1] is not save]
                means.members -= 1
                is_last = not means.members
            if is_last:
                means.close()
            del part, save
            gc.collect()  # an agent without work allocates nothing, and would keep the memory of what is given up


def _save_of(part: Part, means: _Means, ledger: Ledger) -> HeldSave:
    return HeldSave(
        part.hand,
        part.memory.view,
        part.documents,
        client=means.client,
        workers=means.workers,
        job=means.job,
        rank_lives=lambda: True,  # perhaps: only the way to that host may be gone
        ledger=ledger,
        digests=part.digests,
    )


def _lost(source: PeerAddress, parts: Sequence[Part], run: RunName) -> list[Part]:
    """Those of `source` that it does not have any more: it is gone, or was started anew."""
    of_source = [part for part in parts if part.source == source]
    digests = sorted({digest for part in of_source for digest in part.digests})
    try:
        sizes = Found.model_validate_json(ask(source, FIND, Find(project=run.project, run=run.run, digests=digests)))
    except TROUBLE:
        return of_source
    there = {digest for digest, size in zip(digests, sizes.bytes, strict=False) if size is not None}
    return [part for part in of_source if not there.issuperset(part.digests)]

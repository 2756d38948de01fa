"""One staged save, as the background half of a save reads it."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

from holdfast.layout.plan import LocalPlan


class StagedShard(ABC):
    """The bytes of each chunk. Chunks have the ordinals 0 to chunk_count - 1 and are taken in this order."""

    def __init__(self, plan: LocalPlan) -> None:
        self.plan = plan

    @property
    @abstractmethod
    def can_repeat(self) -> bool:
        """Every chunk can be taken again until release(), and training does not wait for the upload."""

    @property
    def room_bytes(self) -> int | None:
        """How much is staged at once, where chunk() waits for the room of earlier chunks; None: all of it is."""
        return None

    @property
    def chunk_count(self) -> int:
        return len(self.plan.shard.chunks)

    @property
    def total_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(self.plan.shard.chunks)

    @abstractmethod
    def chunk(self, ordinal: int, stop: threading.Event | None = None) -> memoryview:
        """The chunk's bytes: contiguous, read-only, no copy. They stay as they are until done_with() or release().

        May wait until they are staged; raises TransferStopped soon after `stop` is set, what staging has failed with,
        and RuntimeError after release().
        """

    @abstractmethod
    def digest(self, ordinal: int) -> str | None:
        """The chunk's digest where an earlier save has found it and no byte has changed since."""

    @abstractmethod
    def hashed(self, digests: Sequence[str]) -> None:
        """Tells the digests of the chunks, by ordinal."""

    @abstractmethod
    def done_with(self, ordinal: int) -> None:
        """Nobody reads this chunk any more."""

    @abstractmethod
    def give_up(self) -> None:
        """No more chunks will be taken: training, if it waits for room, goes on at once. May be called twice."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory back for the next save. All readers of its chunks must have ended. May be called twice."""

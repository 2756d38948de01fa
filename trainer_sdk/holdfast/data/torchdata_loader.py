"""torchdata's StatefulDataLoader on another number of ranks.

Its own state is one rank's place, and does not say how many ranks shared the data. components.py puts this around a
loader with a StatefulDistributedSampler. The ranks take every n-th sample of one order, so all samples that they have
trained on are a prefix of that order, on any number of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

_SHARED = "holdfast_shared"
"""The key of a place that means the same on any number of ranks, beside torchdata's own."""


class SharedPlace:
    """A StatefulDataLoader whose state also says how much of the epoch all ranks together have had."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._sampler = loader.sampler

    def state_dict(self) -> dict[str, Any]:
        """torchdata's, and what _place() says."""
        state: dict[str, Any] = self._loader.state_dict()
        return {**state, _SHARED: self._place(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """On as many ranks as saved it."""
        self._loader.load_state_dict({key: value for key, value in state.items() if key != _SHARED})

    def load_resharded_state_dict(self, states: Sequence[dict[str, Any]], *, rank: int, world_size: int) -> None:
        """For another number of ranks. Raises ValueError if the ranks were at several places, or if these ranks cannot
        share evenly what is left."""
        places = [state.get(_SHARED) for state in states]
        place = places[0]
        if place is None or any(each != place for each in places):
            raise ValueError("the ranks were not at one place of the data; restore on as many ranks as saved it")
        if place["length"] != len(self._sampler.dataset):
            raise ValueError(f"the data had {place['length']} samples and has {len(self._sampler.dataset)} now")
        ranks, taken = self._sampler.num_replicas, min(place["samples"], place["length"])
        if taken % ranks and taken < place["length"]:
            raise ValueError(
                f"{taken} samples were trained on, and {ranks} ranks cannot share the rest evenly; restore on a number "
                "that divides it, or use holdfast.data.ResumableLoader, which goes on on any number"
            )
        self._loader.load_state_dict({})
        self._sampler.yielded = -(-taken // ranks)  # for a save before the next batch
        self._sampler.load_state_dict({"yielded": self._sampler.yielded})

    def _place(self, state: dict[str, Any]) -> dict[str, int]:
        """Samples that all ranks have had of this epoch, and those of the data."""
        snapshot = state.get("_snapshot")  # with workers, torchdata's state is that of an earlier batch and a count
        own = state if snapshot is None else snapshot["_main_snapshot"]
        of_batches = own["_sampler_iter_state"]  # None without batches
        yielded = (of_batches["sampler_state"] if of_batches else own["_index_sampler_state"])["yielded"]
        yielded += state.get("_steps_since_snapshot", 0) * (self._loader.batch_size or 1)
        samples = 0 if state["_iterator_finished"] else yielded * self._sampler.num_replicas
        return {"samples": samples, "length": len(self._sampler.dataset)}


def shared_place(loader: Any) -> SharedPlace | None:
    """None for any other object, and for a loader whose ranks do not share one order."""
    torchdata = sys.modules.get("torchdata.stateful_dataloader.stateful_dataloader")
    if torchdata is None or type(loader) is not torchdata.StatefulDataLoader:
        return None
    # Older releases of torchdata have no such sampler, or no such module.
    sampler = getattr(sys.modules.get("torchdata.stateful_dataloader.sampler"), "StatefulDistributedSampler", None)
    return SharedPlace(loader) if type(loader.sampler) is sampler else None

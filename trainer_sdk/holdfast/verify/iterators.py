"""How far each iterator of a DataLoader is. In the script: recorder -> **iterators**.

Nothing leads to an iterator: `for` holds it, and no variable. So they are noted when they are made, from the moment at
which the Checkpointer is made, and forgotten when they are gone.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter


class IteratorBook:
    """One per process that is verified: it hangs itself into torch's DataLoader, which has no hook for it."""

    def __init__(self) -> None:
        self._live: WeakSet[_BaseDataLoaderIter] = WeakSet()
        make = _BaseDataLoaderIter.__init__

        def make_and_note(iterator: _BaseDataLoaderIter, loader: DataLoader[Any]) -> None:
            make(iterator, loader)
            self._live.add(iterator)

        kind: Any = _BaseDataLoaderIter
        kind.__init__ = make_and_note

    def batches_given(self) -> list[int]:
        """How many batches each of them has handed out, in the order of these numbers."""
        return sorted(iterator._num_yielded for iterator in self._live)

"""The position of each iterator of a DataLoader. In the script: recorder -> **iterators**.

No variable leads to an iterator, because only `for` holds it. So iterators are recorded when they are made, from the
making of the Checkpointer on, and forgotten when they are gone.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter


class IteratorBook:
    """One per verified process: it replaces a method of torch's DataLoader, which has no hook for it."""

    def __init__(self) -> None:
        self._live: WeakSet[_BaseDataLoaderIter] = WeakSet()
        make = _BaseDataLoaderIter.__init__

        def make_and_note(iterator: _BaseDataLoaderIter, loader: DataLoader[Any]) -> None:
            make(iterator, loader)
            self._live.add(iterator)

        kind: Any = _BaseDataLoaderIter
        kind.__init__ = make_and_note

    def batches_given(self) -> list[int]:
        """The number of batches that each of them has handed out, in the order of their making."""
        return sorted(iterator._num_yielded for iterator in self._live)

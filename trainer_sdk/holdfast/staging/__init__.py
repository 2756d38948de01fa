"""Device and host tensors -> host memory that the background half of a save reads. Training waits for nothing else, and
with `overlap=True` for less.

Flow: capture -> plan -> **stage** -> hash -> upload.

    shard.py    the memory of a save, kept from save to save: for the whole shard at once, or a window of bounded size,
                whose room is reused while the shard is uploaded
    places.py   the slabs, and which one the next save gets
    copy.py     the copies into it, and the pieces that need no copy
    overlap.py  the copies that training does not wait for, and the guard on what they read
"""

from holdfast.staging.places import StagingBusyError
from holdfast.staging.shard import StagedShard, StagingArea, WindowedShard

__all__ = ["StagedShard", "StagingArea", "StagingBusyError", "WindowedShard"]

"""Device and host tensors -> host memory that the background half of a save reads. All that training waits for.

Flow: capture -> plan -> **stage** -> hash -> upload.

    area.py     which memory a save gets, kept from save to save
    whole.py    the whole shard at once; frozen.py: what need not be copied again
    window.py   a window of bounded size, whose room is reused while the shard goes up
    shard.py    what the upload sees of either; slab.py: the memory; bits.py, host_copy.py: the copies
"""

from holdfast.staging.area import StagingArea, StagingBusyError
from holdfast.staging.shard import StagedShard
from holdfast.staging.window import WindowedShard

__all__ = ["StagedShard", "StagingArea", "StagingBusyError", "WindowedShard"]

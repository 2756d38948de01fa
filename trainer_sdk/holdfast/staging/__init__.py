"""Device and host tensors -> host memory that the background half of a save reads. All that training waits for.

Flow: capture -> plan -> **stage** -> hash -> upload.

    shard.py    which memory a save gets, kept from save to save: for the whole shard at once, or a window of bounded
                size, whose room is reused while the shard goes up
    copy.py     the copies into it, and what need not be copied again
"""

from holdfast.staging.shard import StagedShard, StagingArea, StagingBusyError, WindowedShard

__all__ = ["StagedShard", "StagingArea", "StagingBusyError", "WindowedShard"]

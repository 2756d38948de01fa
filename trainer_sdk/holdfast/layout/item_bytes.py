"""How wide the numbers of each chunk are: what the compression of a chunk puts its bytes in planes by. Pure, no torch.

Flow: plan -> **item sizes** -> OutgoingChunk -> holdfast_client, which compresses where that is asked for.
"""

from collections import Counter
from collections.abc import Mapping

from holdfast_protocol.index_documents import ShardLayout

_FLOAT_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 2,
    "complex64": 4,
    "complex128": 8,
}
"""Of one floating-point number; a complex one is two. Integers are often small or alike as they are, and 8-bit floats
are bytes."""


def item_bytes_of_chunks(shard: ShardLayout, dtypes: Mapping[str, str]) -> tuple[int, ...]:
    """By ordinal, the size of the floating-point numbers that most of the chunk's bytes belong to; 1 where most of them
    belong to none. `dtypes`: by the names of the shard's tensors."""
    by_size: list[Counter[int]] = [Counter() for _ in shard.chunks]
    for piece in shard.pieces:
        size = _FLOAT_BYTES.get(dtypes[piece.tensor], 1)
        for segment in piece.segments:
            by_size[segment.ordinal][size] += segment.bytes
    return tuple(max(sizes, key=lambda size: (sizes[size], size), default=1) for sizes in by_size)

"""Which rank stores a piece that several ranks hold. Pure and local: no rank asks another.

Below plan.py. Every rank computes the same answer from the tensor's name and its own coordinates.
"""

import hashlib

from holdfast.layout.pieces import PieceSpec


def owns(spec: PieceSpec, rank: int, world_size: int) -> bool:
    """Whether `rank` stores this piece. Exactly one of the ranks that hold a box says yes.

    Replicated tensors are spread by a hash of their name; copies along a mesh dimension likewise, by coordinate.
    """
    if spec.alias_of is not None:
        return False
    if spec.owner is not None:
        return rank == spec.owner
    if spec.replicas:
        return all(
            _spread(f"{dimension}:{spec.name}", size) == coordinate
            for dimension, (coordinate, size) in enumerate(spec.replicas)
        )
    return not spec.replicated or _spread(spec.name, world_size) == rank


def _spread(name: str, over: int) -> int:
    # Python's own hash() is salted per process: the ranks would disagree.
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % over

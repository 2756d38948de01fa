"""What a service says of documents that it cannot read, in a drill or when it compares values."""

from __future__ import annotations

import pytest

from holdfast_protocol.digests import canonical_bytes, checkpoint_digest, chunk_digest, compress, shard_digest
from holdfast_protocol.index_documents import Layout, SavedAs, ShardLayout
from holdfast_protocol.problems import ProblemCode
from holdfast_service.errors import ProblemError
from holdfast_service.restore.service_reader import SealedShard, proven_layout


@pytest.mark.parametrize(
    ("told", "code"),
    [("holdfast-shard-9", ProblemCode.UNSUPPORTED_PROTOCOL), ("other-shard-9", ProblemCode.CHUNK_GONE)],
)
def test_the_index_of_a_newer_holdfast_is_not_called_damage(told: str, code: ProblemCode) -> None:
    documents = [Layout(1, {}, (ShardLayout((), ()),)).encode(), compress(canonical_bytes({"format": told}))]
    layout, index = digests = [chunk_digest(document) for document in documents]
    shard = SealedShard(0, shard_digest(digests), digests, index, layout)
    sizes = {digest: len(document) for digest, document in zip(digests, documents, strict=True)}
    with pytest.raises(ProblemError, match=told) as refused:
        proven_layout(
            [shard],
            sizes,
            lambda _: dict(zip(digests, documents, strict=True)),
            checkpoint_digest([shard.digest]),
            SavedAs("demo/gpt", 7, 1),
        )
    assert refused.value.code is code

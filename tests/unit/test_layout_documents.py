"""The index documents: canonical, small, fast, and one clear error for anything that is not one."""

import json
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_protocol.digests import DocumentError, NewerDocumentError, canonical_bytes, compress, decompress, parse
from holdfast_protocol.index_documents import Layout, Piece, SavedAs, Segment, ShardIndex, ShardLayout, TensorEntry

SAVED_AS = SavedAs("demo/gpt", 20, 4)


def small_layout():
    tensors = {
        "model/b": TensorEntry("model", "float32", (4, 2), False),
        "model/a": TensorEntry("model", "bfloat16", (), True),
        "model/tied": TensorEntry("model", "float32", (4, 2), False, alias_of="model/b"),
    }
    upper = Piece("model/b", (0, 0), (2, 2), (Segment(0, 0, 16),))
    shards = (
        ShardLayout((16, 2), (upper, Piece("model/a", (), (), (Segment(1, 0, 2),)))),
        ShardLayout((16,), (upper._replace(offsets=(2, 0)),)),
    )
    return Layout(2, tensors, shards)


def test_layout_round_trips_and_is_the_documented_json():
    layout = small_layout()
    assert Layout.decode(layout.encode()) == layout
    assert json.loads(zlib.decompress(layout.encode())) == {
        "format": "holdfast-layout-1",
        "world_size": 2,
        "tensors": {
            "model/a": {"component": "model", "dtype": "bfloat16", "shape": [], "replicated": True},
            "model/b": {"component": "model", "dtype": "float32", "shape": [4, 2], "replicated": False},
            "model/tied": {
                "component": "model", "dtype": "float32", "shape": [4, 2], "replicated": False, "alias_of": "model/b",
            },
        },
        "shards": [
            {"chunks": [16, 2], "pieces": [[1, [0, 0], [2, 2], [[0, 0, 16]]], [0, [], [], [[1, 0, 2]]]]},
            {"chunks": [16], "pieces": [[1, [2, 0], [2, 2], [[0, 0, 16]]]]},
        ],
    }  # fmt: skip


def test_the_digest_does_not_depend_on_insertion_order():
    layout = small_layout()
    turned = Layout(2, dict(reversed(layout.tensors.items())), layout.shards)
    assert turned.digest == layout.digest
    assert turned.encode() == layout.encode()


def test_shard_index_round_trips():
    index = ShardIndex(SAVED_AS, 3, "ab" * 32, {"dataloader": ["value", 1]}, {"model": ["module", None]}, {"dict": []})
    assert ShardIndex.decode(index.encode()) == index
    assert parse(decompress(index.encode()))["format"] == "holdfast-shard-2"


def test_only_an_index_with_a_tensor_subclass_has_the_number_that_older_readers_refuse():
    said = ShardIndex(SAVED_AS, 0, "", {"notes": ["value", '{"wrapped":[]}']})
    wraps = ShardIndex(SAVED_AS, 0, "", {"notes": ["value", {"wrapped": []}]})
    assert parse(decompress(said.encode()))["format"] == "holdfast-shard-2"
    assert parse(decompress(wraps.encode()))["format"] == "holdfast-shard-3"
    assert ShardIndex.decode(wraps.encode()) == wraps


def test_nan_never_becomes_a_json_token():
    with pytest.raises(DocumentError):
        ShardIndex(SAVED_AS, 0, "", {"extra": float("nan")}).encode()


def test_the_layout_of_ten_thousand_tensors_is_small():
    names = [f"model/layers.{at}.weight" for at in range(10_000)]
    tensors = {name: TensorEntry("model", "bfloat16", (1024, 1024), False) for name in names}
    shards = tuple(
        ShardLayout(
            (1 << 20,) * len(names),
            tuple(Piece(n, (r * 512, 0), (512, 1024), (Segment(at, 0, 1 << 20),)) for at, n in enumerate(names)),
        )
        for r in range(2)
    )
    assert len(Layout(2, tensors, shards).encode()) < 500_000


def peak_bytes_of_refusing(document, data):
    tracemalloc.start()
    try:
        with pytest.raises(DocumentError) as refused:
            document.decode(data)
        return tracemalloc.get_traced_memory()[1], str(refused.value)
    finally:
        tracemalloc.stop()


@pytest.mark.rule("bounded-index")
@pytest.mark.parametrize(
    "text",
    [b" " * 50_000_000, b"[" + b"[]," * 16_000_000 + b"0]", b'{"a":[' + b"{}," * 16_000_000 + b"0]}"],
    ids=["spaces", "lists", "objects"],
)
def test_a_bomb_of_some_kilobytes_is_refused_before_it_fills_memory(text):
    bomb = zlib.compress(text, 9)
    assert len(bomb) < 60_000
    for document in (Layout, ShardIndex):
        peak, said = peak_bytes_of_refusing(document, bomb)
        assert "larger than" in said
        assert peak < 16 * 1024**2


@pytest.mark.rule("bounded-index")
def test_a_state_of_the_same_value_over_and_over_is_read_back_all_the_same():
    index = ShardIndex(SAVED_AS, 0, "ab" * 32, {"loader": ["value", [0] * 800_000]})
    assert ShardIndex.decode(index.encode()) == index


def test_what_could_not_be_read_back_is_not_written():
    with pytest.raises(DocumentError, match="as torch tensors"):
        compress(b"x" * 11, max_bytes=10)


@given(st.binary(max_size=200))
def test_random_bytes_give_one_clear_error(data):
    for document in (Layout, ShardIndex):
        with pytest.raises(DocumentError):
            document.decode(data)
        with pytest.raises(DocumentError):
            document.decode(zlib.compress(data))


@pytest.mark.parametrize("text", [b"NaN", b"[Infinity]", b"[" * 100_000, b"1" * 5000, b'{"a":', b"\xff"])
def test_hostile_json_gives_one_clear_error(text):
    with pytest.raises(DocumentError):
        Layout.decode(zlib.compress(text))


def test_trailing_and_missing_bytes_are_refused():
    data = small_layout().encode()
    for broken in (data + b"x", data[:-1], b""):
        with pytest.raises(DocumentError):
            Layout.decode(broken)


def change(path, value):
    document = parse(decompress(small_layout().encode()))
    at = document
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return compress(canonical_bytes(document))


@pytest.mark.parametrize("told", ["holdfast-layout-2", "holdfast-layout-9999"])
def test_a_newer_format_is_told_from_damage(told):
    with pytest.raises(NewerDocumentError, match=f"its format is {told}, and this holdfast reads holdfast-layout-1"):
        Layout.decode(change(["format"], told))


@pytest.mark.parametrize(
    "told", ["holdfast-layout-0", "holdfast-layout-2x", "holdfast-layout-10000", "holdfast-shard-3", " 2", 2, None]
)
def test_any_other_format_is_damage(told):
    with pytest.raises(DocumentError) as caught:
        Layout.decode(change(["format"], told))
    assert type(caught.value) is DocumentError


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["format"], "holdfast-layout-2"),
        (["world_size"], 3),
        (["world_size"], True),
        (["extra"], 1),
        (["tensors", "model/b", "dtype"], "float7"),
        (["tensors", "model/b", "shape"], [4, -2]),
        (["tensors", "model/b", "shape"], [4]),
        (["tensors", "model/b", "replicated"], 0),
        (["tensors", "model/tied", "alias_of"], "model/tied"),
        (["tensors", "model/tied", "alias_of"], "model/a"),
        (["tensors", "model/tied", "alias_of"], "nowhere"),
        (["shards", 0, "chunks"], [15, 2]),
        (["shards", 0, "chunks"], [16.0, 2]),
        (["shards", 0, "pieces", 0, 0], 7),
        (["shards", 0, "pieces", 0, 0], -1),
        (["shards", 0, "pieces", 0, 1], [3, 0]),
        (["shards", 0, "pieces", 0, 2], [1, 2]),
        (["shards", 0, "pieces", 0, 3], [[5, 0, 16]]),
        (["shards", 0, "pieces", 0, 3], [[0, 1, 16]]),
        (["shards", 0, "pieces", 0, 3], [[0, 0]]),
        (["shards"], {}),
        (["tensors"], []),
        (["tensors", "model/b", "shape"], [4, 2, *[1] * 63]),
        (["tensors", "model/b", "shape"], [0] * 100_000),
        (["tensors", "model/b", "shape"], [2**62, 2]),
        (["tensors", "model/b", "shape"], [2**40, 2**40]),
        (["tensors", "model/b", "shape"], [10**4000, 2]),
        (["tensors", "model/b", "shape"], [5, 2]),
        (["tensors", "model/c"], {"component": "model", "dtype": "bool", "shape": [1], "replicated": False}),
        (["shards", 0, "chunks"], [2**62, 2]),
        (["shards", 0, "pieces", 1], [2, [0, 0], [2, 2], [[0, 0, 16]]]),
        (["shards", 0, "pieces", 1], [1, [2, 0], [2, 2], [[0, 0, 16]]]),
        (["shards", 0, "pieces", 0, 3], [[0, 0, 16], [0, 16, 0]]),
        (["shards", 0, "pieces", 0, 3], [[0, 0, 6], [0, 6, 10]]),
        (["shards", 0, "pieces", 0, 3], [[0, 0, 12], [0, 8, 4]]),
        (["shards", 0, "pieces", 1], [0, [], [], []]),
        (["shards", 1, "pieces", 0, 1], [0, 0]),
        (["shards", 1, "pieces"], []),
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.rule("bounded-index")
def test_a_layout_that_points_outside_itself_is_refused(path, value):
    with pytest.raises(DocumentError) as refused:
        Layout.decode(change(path, value))
    assert len(str(refused.value)) < 1000


def places(document, path=()):
    """Every place of a JSON document."""
    yield path
    inner = document.items() if isinstance(document, dict) else enumerate(document) if type(document) is list else ()
    for key, value in inner:
        yield from places(value, (*path, key))


PLACES = sorted((place for place in places(json.loads(small_layout().canonical)) if place), key=str)
NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 7, 16, 17, 2**31, 2**61, 2**62, 2**63, 2**64, 10**30])
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.rule("bounded-index")
@given(st.lists(st.tuples(st.sampled_from(PLACES), NUMBERS | ANYTHING), min_size=1, max_size=3))
def test_whatever_is_put_into_a_layout_it_is_refused_or_asks_for_no_more_than_its_chunks_hold(changes):
    document = json.loads(small_layout().canonical)
    for path, value in changes:
        at = document
        try:
            for step in path[:-1]:
                at = at[step]
            at[path[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has taken the place away
    try:
        layout = Layout.decode(compress(canonical_bytes(document)))
    except DocumentError:
        return
    assert layout.tensor_bytes <= sum(sum(shard.chunks) for shard in layout.shards) < 2**63
    assert layout.torn() is None
    assert Layout.decode(layout.encode()) == layout

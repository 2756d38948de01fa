"""The typed tree gives back equal values of exactly equal types, through real JSON text."""

import datetime
import enum
import json
import math
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import TreeFormatError, UnsupportedStateError
from holdfast.state.tree import TensorRef, decode_tree, encode_tree, tensor_refs
from holdfast_protocol.digests import canonical_bytes

pytestmark = pytest.mark.rule("typed-trees")


def through_json(value):
    return decode_tree(json.loads(canonical_bytes(encode_tree(value))))


def same(one, other):
    """Equal with types, order of dicts, NaN payloads and signed zeros."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float | np.floating):
        return np.float64(one).tobytes() == np.float64(other).tobytes() or (one == other and one != 0)
    if isinstance(one, complex):
        return struct.pack("dd", one.real, one.imag) == struct.pack("dd", other.real, other.imag)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        factories = getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
        pairs = zip(one.items(), other.items(), strict=True)
        return factories and len(one) == len(other) and all(same(a, c) and same(b, d) for (a, b), (c, d) in pairs)
    if isinstance(one, list | tuple | deque):
        lengths = len(one) == len(other) and getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        return lengths and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, set | frozenset):
        return len(one) == len(other) and sorted(map(typed, one)) == sorted(map(typed, other))
    if isinstance(one, datetime.datetime | datetime.time):
        return one == other and one.fold == other.fold and one.tzinfo == other.tzinfo
    return one == other


def typed(value):
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} {sorted(map(typed, value))}"
    if type(value) is tuple:
        return f"tuple {[typed(item) for item in value]}"
    return f"{type(value).__name__} {value!r}"


zones = st.none() | st.builds(
    datetime.timezone, st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23))
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**1000), max_value=10**1000)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.complex_numbers(allow_nan=True, allow_infinity=True)
    | st.text(st.characters(codec=None))
    | st.text(st.sampled_from("\ud83d\ude00a\ud800\udfff"))
    | st.binary()
    | st.dates()
    | st.datetimes(timezones=zones)
    | st.times()
    | st.timedeltas()
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 0])])
    | st.sampled_from([np.float32(1.5), np.int8(-3), np.bool_(True), np.str_("é"), np.bytes_(b"x"), np.float64("nan")])
    | st.sampled_from([np.datetime64("2024-01-01"), np.timedelta64(5, "s"), np.complex64(1 - 0j), np.uint64(2**64 - 1)])
    | st.sampled_from([pathlib.Path("/a/b"), pathlib.Path(), np.bytes_(b""), np.str_("")])
)
keys = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3), max_leaves=4
)
arrays = st.builds(
    lambda dtype, shape, seed: np.frombuffer(
        np.random.default_rng(seed).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype
    ).reshape(shape),
    st.sampled_from(["<f4", ">f8", "<f2", "<i8", ">i2", "u1", "<c8", "<M8[ns]", "S3"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 99),
)
trees = st.recursive(
    scalars | arrays | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=3).map(lambda d: defaultdict(list, d))
        | st.dictionaries(keys, st.integers(), max_size=3).map(Counter)
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
        | st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(3, 5))
    ),
    max_leaves=20,
)


@given(trees)
def test_every_tree_survives_json_with_its_types(value):
    assert same(through_json(value), value)


@given(trees)
def test_the_same_value_has_the_same_bytes(value):
    assert canonical_bytes(encode_tree(value)) == canonical_bytes(encode_tree(through_json(value)))


@pytest.mark.parametrize("bits", ["7ff8000000000000", "fff8000000000001", "7ff0000000000001", "8000000000000000"])
def test_nan_payloads_and_negative_zero_keep_their_bits(bits):
    value = struct.unpack(">d", bytes.fromhex(bits))[0]
    assert struct.pack(">d", through_json([value])[0]).hex() == bits


def test_multisteplr_milestones_stay_integers_and_fire():
    milestones = through_json({"milestones": Counter({3: 1, 5: 1}), "last_epoch": 3})["milestones"]
    assert milestones[3] == 1
    assert all(type(key) is int for key in milestones)


def test_dict_order_and_keys_that_only_differ_by_type_survive():
    value = {"b": 1, "a": 2, 1: "int", "1": "str", (1, 2): None}
    assert list(through_json(value).items()) == list(value.items())


def test_a_set_has_the_same_bytes_whatever_its_order():
    one, other = set(range(0, 800, 8)), set()
    for number in reversed(range(0, 800, 8)):
        other.add(number)
    assert encode_tree({f"{n}" for n in one}) == encode_tree({f"{n}" for n in other})
    assert encode_tree(one) == encode_tree(other)


class Colour(enum.IntEnum):
    RED = 1


class OwnDict(dict):
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Colour.RED,
        OwnDict(),
        Point(1, 2),
        print,
        int,
        lambda: 0,
        torch.Generator(),
        torch.nn.Linear(1, 1),
        defaultdict(lambda: 0),
        np.array([object()]),
        np.zeros(1, dtype=[("a", "i4")]),
        np.ma.masked_array([1]),
        np.longdouble(1),
        torch.zeros(1),
        range(3),
        pathlib.PureWindowsPath("c:/"),
        np.zeros(17 * 1024 * 1024, dtype=np.uint8),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.rule("refuse-inexact")
def test_what_cannot_be_kept_is_refused_by_its_key(value):
    with pytest.raises(UnsupportedStateError, match=r"^loader\.queue\[1\] cannot be saved: .+; .+") as refusal:
        encode_tree({"queue": [0, value]}, path="loader")
    assert refusal.value.path == "loader.queue[1]"


@pytest.mark.rule("refuse-inexact")
def test_a_key_that_cannot_be_kept_is_named():
    with pytest.raises(UnsupportedStateError, match="the key"):
        encode_tree({object(): 1}, path="loader")
    with pytest.raises(UnsupportedStateError, match="tensor is used as a key"):
        encode_tree({torch.zeros(1): 1}, path="loader", name_tensor=lambda path, tensor: TensorRef(path))


@pytest.mark.rule("refuse-inexact")
def test_cycles_and_endless_nesting_are_refused_not_crashed_into():
    loop = []
    loop.append(loop)
    with pytest.raises(UnsupportedStateError, match="contains itself"):
        encode_tree(loop)


def test_tensors_become_references_and_come_back_through_the_resolver():
    kept = {}

    def name(path, tensor):
        kept[path] = tensor
        return TensorRef(path, tensor.device.type)

    value = {"a": torch.arange(3), "b": [torch.zeros(1)]}
    encoded = encode_tree(value, path="extra/", name_tensor=name)
    assert tensor_refs(encoded) == [TensorRef("extra/a"), TensorRef("extra/b[0]")]
    restored = decode_tree(json.loads(canonical_bytes(encoded)), resolve_tensor=lambda ref: kept[ref.name])
    assert restored["a"] is value["a"]
    assert restored["b"][0] is value["b"][0]
    assert decode_tree(encoded)["a"] == TensorRef("extra/a", "cpu", False, False)


def test_encoding_keeps_no_reference_to_live_containers():
    live = {"a": [1, 2]}
    encoded = encode_tree(live)
    live["a"].append(3)
    assert decode_tree(encoded) == {"a": [1, 2]}


@pytest.mark.parametrize(
    "encoded",
    [
        {"pickle": "gASVAA=="},
        {"tuple": 3},
        {"dict": [[1]]},
        {"dict": [[["unhashable"], 1]]},
        {"set": [["unhashable"]]},
        {"int": "ten"},
        {"bytes": "not base64!"},
        {"dtype": "load"},
        {"dtype": "__doc__"},
        {"device": "abacus"},
        {"array": ["|O", [1], ""]},
        {"array": ["<f4", [2], "AAAA"]},
        {"array": ["<f4", [1 << 62], ""]},
        {"array": ["|S0", [1 << 20], ""]},
        {"array": ["<U0", [1 << 20], ""]},
        {"tensor": ["name"]},
        {"tensor": ["name", "cpu", 1, 0]},
        {"default_dict": ["eval", []]},
        {"tuple": [], "list": []},
        {},
        {"datetime": ["2024-01-01T00:00:00", 7, None]},
        {"counter": [[1, 2, 3]]},
    ],
    ids=str,
)
def test_hostile_trees_give_one_clear_error(encoded):
    with pytest.raises(TreeFormatError):
        decode_tree([encoded])


def test_hostile_nesting_gives_one_clear_error():
    encoded = 1
    for _ in range(5000):
        encoded = [encoded]
    with pytest.raises(TreeFormatError, match="nested"):
        decode_tree(encoded)


def test_integers_beyond_pythons_own_text_limit_survive_as_values_and_keys():
    assert through_json({10**5000: -(10**6000)}) == {10**5000: -(10**6000)}


def test_an_integer_float_stays_a_float():
    assert type(through_json(1.0)) is float
    assert type(through_json(2**53)) is int
    assert math.copysign(1, through_json(-0.0)) == -1

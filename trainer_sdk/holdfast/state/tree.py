"""The typed tree: every part of the state that is not a planned tensor, as JSON that gives back exact types.

Flow: capture encodes each component's state_dict; the index keeps it; apply decodes it and hands it whole to
load_state_dict. Nothing is pickled or imported by name, so a hostile index can build values only.

Form: null, booleans, text, integers below 2**53 and finite floats are themselves; a list is a JSON array; any other
value is an object with one key, its tag: {"tuple": […]}, {"dict": [[key, value], …]}, {"tensor": […]} and so on.
{"wrapped": […]} is a tensor subclass, told by its class and the tensors inside (wrappers.py).
Shared sub-objects come back as equal copies (tied tensors stay tied, by their name); cycles are refused.
"""

from __future__ import annotations

import base64
import datetime
import math
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.errors import StateMismatchError, TreeFormatError, UnsupportedStateError
from holdfast.state.tensors import is_plain
from holdfast.state.wrappers import (
    Whole,
    WrappedTensor,
    fields_of,
    inner_path,
    known_wrapper,
    of_fields,
    put_together,
    refuse_other_shards,
    take_apart,
)
from holdfast_protocol.digests import canonical_bytes
from holdfast_protocol.index_documents import MAX_DIMENSIONS

MAX_ARRAY_BYTES = 16 * 1024 * 1024
"""Every save sends the tree as JSON: large arrays belong into chunks, as tensors."""

_KINDS = "biufcmMSU"
_WIDEST_FLOAT = {"f": 8, "c": 16}

NUMPY_SCALARS: tuple[type, ...] = tuple(
    {np.dtype(code).type for code in np.typecodes["All"] if np.dtype(code).kind in _KINDS}
)


def encode_array(value: np.ndarray[Any, Any], path: str) -> list[Any]:
    """[dtype, shape, base64 of the bytes]. Raises UnsupportedStateError for object, structured and long double."""
    _check_dtype(value.dtype, path)
    if value.nbytes > MAX_ARRAY_BYTES:
        raise UnsupportedStateError(
            path, f"a numpy array of {value.nbytes} bytes is too large for the index", "give torch.from_numpy(…) of it"
        )
    return [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes("C")).decode("ascii")]


def decode_array(payload: Any) -> np.ndarray[Any, Any]:
    """The inverse: C-contiguous and writable. Raises ValueError or TypeError for a payload not of encode_array's
    form."""
    text, shape, data = payload
    dtype = np.dtype(text)
    raw = base64.b64decode(data, validate=True)
    if len(shape) > MAX_DIMENSIONS or not dtype.itemsize:  # numpy gives the elements of "S0" a byte each
        raise ValueError(f"no array has {len(shape)} dimensions of {dtype.itemsize} bytes")
    if dtype.kind not in _KINDS or len(raw) != prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of {shape} {text} does not have {len(raw)} bytes")
    array = np.empty(shape, dtype)
    # Through bytes, not element by element: NaN payloads must not pass an FPU.
    if raw:
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(raw, np.uint8)
    return array


def encode_scalar(value: np.generic, path: str) -> list[Any]:
    """[dtype, base64 of the bytes]."""
    _check_dtype(value.dtype, path)
    whole = np.asarray(value)  # an empty text's own dtype has 0 bytes, which an array cannot have
    return [whole.dtype.str, base64.b64encode(whole.tobytes()).decode("ascii")]


def decode_scalar(payload: Any) -> np.generic:
    """The inverse. Raises ValueError or TypeError for a payload not of encode_scalar's form."""
    text, data = payload
    scalar: Any = decode_array([text, [], data])[()]
    if not isinstance(scalar, np.generic):
        raise TypeError(f"{text[:80]!r} is not a scalar's dtype")
    return scalar


def _check_dtype(dtype: np.dtype[Any], path: str) -> None:
    if dtype.kind not in _KINDS or dtype.itemsize > _WIDEST_FLOAT.get(dtype.kind, dtype.itemsize):
        raise UnsupportedStateError(path, f"numpy dtype {dtype} has no portable form", "convert it to a plain dtype")


EncodeChild = Callable[[Any, str], Any]
"""(child, its part of the path) -> its encoded form."""
DecodeChild = Callable[[Any], Any]

_FACTORIES: dict[str, Any] = {"list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str}


class Tag(NamedTuple):
    """How one type is written: encode(value, path, child) -> payload, decode(payload, child) -> value. One per type for
    which JSON has no exact word. Types are matched exactly (`type(x) is T`): `encode_tree` refuses a subclass, because
    its base's payload could lose behaviour."""

    name: str
    types: tuple[type, ...]
    encode: Callable[[Any, str, EncodeChild], Any]
    decode: Callable[[Any, DecodeChild], Any]


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _unb64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _float_bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _float_of(bits: str) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    return float(value)


def _encode_items(value: Any, path: str, child: EncodeChild) -> list[Any]:
    if set(map(type, value)) == {int} and max(map(abs, value)) < MAX_PLAIN_INT:  # a generator's state has hundreds
        return list(value)
    return [child(item, f"[{at}]") for at, item in enumerate(value)]


def _encode_set(value: Any, path: str, child: EncodeChild) -> list[Any]:
    # A set's own order is salted per process; a sorted set gives the same bytes on every rank and save.
    return sorted((child(item, "{…}") for item in value), key=canonical_bytes)


def _encode_pairs(value: Any, path: str, child: EncodeChild) -> list[Any]:
    pairs = []
    for key, item in value.items():
        step = f".{key}" if isinstance(key, str) else f"[{_short(key)}]"
        if isinstance(key, torch.Tensor):
            raise UnsupportedStateError(
                path + "[tensor]", "a tensor is used as a key", "use a number or text as the key"
            )
        pairs.append([child(key, f" (the key {_short(key)})"), child(item, step)])
    return pairs


def _short(key: Any) -> str:
    try:
        return f"{key!r:.80}"
    except Exception:  # a broken __repr__, or an integer beyond python's limit for text; the path is only for people
        return f"a {type(key).__name__}"


def _decode_pairs(payload: Any, child: DecodeChild) -> list[tuple[Any, Any]]:
    return [(child(key), child(item)) for key, item in payload]


def _encode_defaultdict(value: Any, path: str, child: EncodeChild) -> list[Any]:
    factory = value.default_factory
    for name, known in _FACTORIES.items():
        if factory is known:
            return [name, _encode_pairs(value, path, child)]
    if factory is None:
        return [None, _encode_pairs(value, path, child)]
    raise UnsupportedStateError(
        path, f"its default factory {factory!r:.80} is not one of {', '.join(_FACTORIES)}", "give dict(…) of it"
    )


def _decode_defaultdict(payload: Any, child: DecodeChild) -> Any:
    name, pairs = payload
    return defaultdict(None if name is None else _FACTORIES[name], _decode_pairs(pairs, child))


def _decode_deque(payload: Any, child: DecodeChild) -> Any:
    longest, items = payload
    return deque([child(item) for item in items], longest)


def _decode_counter(payload: Any, child: DecodeChild) -> Any:
    return Counter(dict(_decode_pairs(payload, child)))


def _encode_zone(zone: datetime.tzinfo | None, path: str) -> list[int] | None:
    if zone is None:
        return None
    if type(zone) is not datetime.timezone or zone.tzname(None) != datetime.timezone(zone.utcoffset(None)).tzname(None):
        raise UnsupportedStateError(path, "its time zone is not a plain UTC offset", "convert it with .astimezone(UTC)")
    return _encode_delta(zone.utcoffset(None))


def _decode_zone(payload: list[int] | None) -> datetime.timezone | None:
    if payload is None:
        return None
    offset = datetime.timedelta(*payload)
    return datetime.timezone(offset) if offset else datetime.UTC


def _encode_delta(value: datetime.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _encode_datetime(value: datetime.datetime, path: str, child: EncodeChild) -> list[Any]:
    return [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, _encode_zone(value.tzinfo, path)]


def _decode_datetime(payload: Any, child: DecodeChild) -> datetime.datetime:
    text, fold, zone = payload
    return datetime.datetime.fromisoformat(text).replace(fold=fold, tzinfo=_decode_zone(zone))


def _encode_time(value: datetime.time, path: str, child: EncodeChild) -> list[Any]:
    return [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, _encode_zone(value.tzinfo, path)]


def _decode_time(payload: Any, child: DecodeChild) -> datetime.time:
    text, fold, zone = payload
    return datetime.time.fromisoformat(text).replace(fold=fold, tzinfo=_decode_zone(zone))


def _decode_torch_dtype(payload: str, child: DecodeChild) -> torch.dtype:
    dtype = getattr(torch, payload, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{payload[:80]!r} is not a torch dtype")
    return dtype


_LIST = [
    Tag("int", (int,), lambda v, p, c: hex(v), lambda e, c: int(e, 16)),
    Tag("float", (float,), lambda v, p, c: _float_bits(v), lambda e, c: _float_of(e)),
    Tag(
        "complex",
        (complex,),
        lambda v, p, c: [_float_bits(v.real), _float_bits(v.imag)],
        lambda e, c: complex(*(_float_of(part) for part in e)),
    ),
    # Lone surrogates: JSON's \u escapes would join a high and a low one into one letter.
    Tag(
        "str",
        (str,),
        lambda v, p, c: _b64(v.encode("utf-8", "surrogatepass")),
        lambda e, c: _unb64(e).decode("utf-8", "surrogatepass"),
    ),
    Tag("bytes", (bytes,), lambda v, p, c: _b64(v), lambda e, c: _unb64(e)),
    Tag("bytearray", (bytearray,), lambda v, p, c: _b64(v), lambda e, c: bytearray(_unb64(e))),
    Tag("tuple", (tuple,), _encode_items, lambda e, c: tuple([c(item) for item in e])),
    Tag("size", (torch.Size,), lambda v, p, c: list(v), lambda e, c: torch.Size(e)),
    Tag("set", (set,), _encode_set, lambda e, c: {c(item) for item in e}),
    Tag("frozenset", (frozenset,), _encode_set, lambda e, c: frozenset(c(item) for item in e)),
    # Pairs, not a JSON object: keys keep their type and their order, but canonical JSON would sort them.
    Tag("dict", (dict,), _encode_pairs, lambda e, c: dict(_decode_pairs(e, c))),
    Tag("ordered_dict", (OrderedDict,), _encode_pairs, lambda e, c: OrderedDict(_decode_pairs(e, c))),
    Tag("default_dict", (defaultdict,), _encode_defaultdict, _decode_defaultdict),
    Tag("counter", (Counter,), _encode_pairs, _decode_counter),
    Tag("deque", (deque,), lambda v, p, c: [v.maxlen, _encode_items(v, p, c)], _decode_deque),
    Tag("datetime", (datetime.datetime,), _encode_datetime, _decode_datetime),
    Tag("date", (datetime.date,), lambda v, p, c: v.isoformat(), lambda e, c: datetime.date.fromisoformat(e)),
    Tag("time", (datetime.time,), _encode_time, _decode_time),
    Tag("timedelta", (datetime.timedelta,), lambda v, p, c: _encode_delta(v), lambda e, c: datetime.timedelta(*e)),
    # The flavour is the machine's (PosixPath here, WindowsPath there), so it is not kept.
    Tag("path", (type(pathlib.Path()),), lambda v, p, c: c(str(v), ""), lambda e, c: pathlib.Path(c(e))),
    Tag("dtype", (torch.dtype,), lambda v, p, c: str(v).removeprefix("torch."), _decode_torch_dtype),
    Tag("device", (torch.device,), lambda v, p, c: str(v), lambda e, c: torch.device(e)),
    Tag("array", (np.ndarray,), lambda v, p, c: encode_array(v, p), lambda e, c: decode_array(e)),
    Tag("scalar", NUMPY_SCALARS, lambda v, p, c: encode_scalar(v, p), lambda e, c: decode_scalar(e)),
]

TAGS: dict[str, Tag] = {tag.name: tag for tag in _LIST}
TAGS_BY_TYPE: dict[type, Tag] = {kind: tag for tag in _LIST for kind in tag.types}


MAX_DEPTH = 100
"""Levels of nesting. Encoding and decoding must never meet Python's own recursion limit."""

MAX_PLAIN_INT = 2**53
"""Integers from here on are tagged, because other JSON readers would round them."""


class TensorRef(NamedTuple):
    """A planned tensor's place in a tree. `device` is a type ("cpu", "cuda"), because ordinals differ between ranks."""

    name: str
    device: str = "cpu"
    requires_grad: bool = False
    parameter: bool = False


TensorNamer = Callable[[str, torch.Tensor], TensorRef]
"""(path in the tree, tensor) -> the reference that stands for it. Called once per occurrence."""

TensorResolver = Callable[[TensorRef], Any]
Rebuild = Callable[[WrappedTensor], Any]
"""(a wrapper around resolved tensors, with its metadata encoded) -> what stands for it."""


def encode_tree(value: Any, *, path: str = "", name_tensor: TensorNamer | None = None) -> Any:
    """`value` as plain JSON values. Does not change `value` and keeps no reference to its containers.

    `path` begins the key that messages name. Without `name_tensor` tensors are refused.
    Raises UnsupportedStateError with the path of the first value that cannot be kept exactly.
    """
    return _Encoder(name_tensor).encode(value, path, 0)


def decode_tree(encoded: Any, *, resolve_tensor: TensorResolver | None = None, rebuild: Rebuild | None = None) -> Any:
    """The inverse. Without `resolve_tensor` tensors come back as TensorRef, without `rebuild` wrappers as WrappedTensor
    with their metadata encoded. Raises TreeFormatError."""
    return _Decoder(resolve_tensor, rebuild).decode(encoded, 0)


def rebuilt(taken: WrappedTensor) -> torch.Tensor:
    """The wrapper. Raises StateMismatchError for a class that this process does not know."""
    return put_together(taken._replace(metadata=_metadata_of(taken)))


def check_known(encoded: Any) -> None:
    """Raises StateMismatchError for a tensor subclass in it that `rebuilt` would not make, TreeFormatError."""

    def check(taken: WrappedTensor) -> None:
        known_wrapper(taken.kind)
        _metadata_of(taken)

    decode_tree(encoded, rebuild=check)


def check_alike(path: str, live: torch.Tensor, saved: WrappedTensor) -> None:
    """Raises StateMismatchError if `live` is a tensor subclass whose tensors mean something else than the saved."""
    encoded = encode_tree(live, path=path, name_tensor=lambda name, _: TensorRef(name))
    now = decode_tree(encoded)
    if not isinstance(now, WrappedTensor) or now.frame == saved.frame:
        return
    if now.whole is not None and saved.whole is not None and now.size != saved.size:
        refuse_other_shards(path)
    if now.kind == saved.kind and now.inner.keys() != saved.inner.keys():
        inside, there = (", ".join(sorted(each.inner))[:200] for each in (saved, now))
        raise StateMismatchError(
            path,
            f"it was saved with {inside} inside, and has {there} now",
            "its library makes some of these tensors in the middle of training: have it make them before the restore",
        )
    raise StateMismatchError(
        path,
        f"it was saved as a {saved.kind[:200]} and is now a {now.kind}, or one with other sizes or settings",
        "build it alike: quantize it in the same way before the restore",
    )


def _metadata_of(taken: WrappedTensor) -> Any:
    return _Decoder(None, None, in_metadata=True).decode(taken.metadata, 0)


def tensor_refs(encoded: Any) -> list[TensorRef]:
    """Every tensor reference of an encoded tree, in order, repeats included. Raises TreeFormatError."""
    found: list[TensorRef] = []
    decode_tree(encoded, resolve_tensor=found.append)
    return found


def refs_within(encoded: Any) -> list[tuple[TensorRef, WrappedTensor | None]]:
    """As tensor_refs, each with the tensor subclass that it is inside of."""
    within: dict[str, WrappedTensor] = {}

    def remember(taken: WrappedTensor) -> None:
        within.update({ref.name: taken for ref in taken.inner.values() if isinstance(ref, TensorRef)})

    decode_tree(encoded, rebuild=remember)
    return [(ref, within.get(ref.name)) for ref in tensor_refs(encoded)]


class _Encoder:
    def __init__(self, name_tensor: TensorNamer | None, *, in_metadata: bool = False) -> None:
        self._name_tensor = name_tensor
        self._in_metadata = in_metadata

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise UnsupportedStateError(
                path, f"it is nested more than {MAX_DEPTH} levels deep or contains itself", "flatten it"
            )
        kind = type(value)
        if is_plain(value):  # most values are, and training waits for this
            return self._encode_tensor(value, path, depth)
        if value is None or kind is bool:
            return value
        if kind is int and abs(value) < MAX_PLAIN_INT:
            return value
        if kind is float and math.isfinite(value):
            return value
        if kind is str and not any("\ud800" <= letter <= "\udfff" for letter in value):
            return value
        if kind is list:
            return [self.encode(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(value)]
        if kind is TensorRef:
            return encode_ref(value)
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, path, depth)
        tag = TAGS_BY_TYPE.get(kind)
        if tag is None:
            if self._in_metadata and (found := fields_of(value, path)) is not None:
                name, content = found
                return {"known": [name, self.encode(content, path, depth + 1)]}
            raise _refusal(value, path)
        return {tag.name: tag.encode(value, path, lambda child, step: self.encode(child, _join(path, step), depth + 1))}

    def _encode_tensor(self, value: torch.Tensor, path: str, depth: int) -> Any:
        if self._name_tensor is None:
            raise UnsupportedStateError(path, "a tensor has no place here", "keep it as a value, not as a key")
        taken = None if is_plain(value) else take_apart(path, value)
        if taken is None:
            return encode_ref(self._name_tensor(path, value))
        metadata = _Encoder(None, in_metadata=True).encode(taken.metadata, path, depth + 1)
        inner = [[name, self.encode(each, inner_path(path, name), depth + 1)] for name, each in taken.inner.items()]
        return {"wrapped": [*taken._replace(metadata=metadata)[:-1], inner]}


class _Decoder:
    def __init__(
        self, resolve_tensor: TensorResolver | None, rebuild: Rebuild | None, *, in_metadata: bool = False
    ) -> None:
        self._resolve = resolve_tensor
        self._rebuild = rebuild
        self._in_metadata = in_metadata

    def decode(self, encoded: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise TreeFormatError(f"a typed tree is nested more than {MAX_DEPTH} levels deep")
        if encoded is None or type(encoded) in (bool, int, float, str):
            return encoded
        if type(encoded) is list:
            return [self.decode(item, depth + 1) for item in encoded]
        if type(encoded) is not dict or len(encoded) != 1:
            raise TreeFormatError(f"a typed tree has a {type(encoded).__name__} that is not an object with one tag")
        [(name, payload)] = encoded.items()
        if name == "tensor":
            ref = _decode_ref(payload)
            return ref if self._resolve is None else self._resolve(ref)
        if name == "wrapped":
            taken = _decode_wrapped(payload, lambda child: self.decode(child, depth + 1))
            return taken if self._rebuild is None else self._rebuild(taken)
        if name == "known" and self._in_metadata:
            return self._decode_known(payload, depth)
        tag: Tag | None = TAGS.get(name)
        if tag is None:
            raise TreeFormatError(f"a typed tree has the unknown tag {name[:80]!r}")
        try:
            return tag.decode(payload, lambda child: self.decode(child, depth + 1))
        except (TreeFormatError, StateMismatchError):
            raise
        except Exception as error:  # a constructor may raise any error, but the index is at fault
            raise TreeFormatError(f"a typed tree has a malformed {name!r}: {error}") from error

    def _decode_known(self, payload: Any, depth: int) -> Any:
        try:
            name, content = payload
            return of_fields(name, self.decode(content, depth + 1))
        except StateMismatchError:  # a ValueError too
            raise
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise TreeFormatError(f"a typed tree has a malformed object in a tensor's metadata: {error}") from error


def _decode_wrapped(payload: Any, child: DecodeChild) -> WrappedTensor:
    try:
        kind, size, stride, whole, metadata, requires_grad, parameter, inner = payload
        if [type(each) for each in (kind, requires_grad, parameter)] != [str, bool, bool]:
            raise TypeError("a name and two flags were expected")
        sizes = tuple(map(int, size)), tuple(map(int, stride))
        around = None
        if whole is not None:
            of_whole, strides, dims = whole
            dims = tuple(None if dim is None else int(dim) for dim in dims)
            around = Whole(tuple(map(int, of_whole)), tuple(map(int, strides)), dims)
        pairs = {str(name): each for name, each in inner}
        if not pairs or any(each.keys() not in ({"tensor"}, {"wrapped"}) for each in pairs.values()):
            raise TypeError("it has tensors inside, and nothing else")
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TreeFormatError(f"a typed tree has a malformed tensor subclass: {error}") from error
    tensors = {name: child(each) for name, each in pairs.items()}
    return WrappedTensor(kind, *sizes, around, metadata, requires_grad, parameter, tensors)


def _join(path: str, step: str) -> str:
    return path + (step.removeprefix(".") if path.endswith("/") else step)


def encode_ref(ref: TensorRef) -> Any:
    """As encode_tree() does."""
    return {"tensor": [ref.name, ref.device, ref.requires_grad, ref.parameter]}


def _decode_ref(payload: Any) -> TensorRef:
    if type(payload) is not list or [type(part) for part in payload] != [str, str, bool, bool]:
        raise TreeFormatError("a typed tree has a malformed tensor reference")
    return TensorRef(*payload)


def _refusal(value: Any, path: str) -> UnsupportedStateError:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, tuple):
        remedy = "give a plain tuple or a dict: a named tuple's class cannot be kept without pickle"
    elif isinstance(value, torch.Generator):
        remedy = "give generator.get_state(), and set_state() it on restore"
    elif hasattr(value, "state_dict"):
        remedy = "give it a key of its own at the top of the state"
    elif callable(value):
        remedy = "leave functions and classes out, and set them up in code on every start"
    else:
        remedy = (
            "give plain values (numbers, text, bytes, lists, tuples, dicts, sets, numpy arrays, tensors), "
            "or an object with state_dict() and load_state_dict()"
        )
    return UnsupportedStateError(path, f"it is of type {name}", remedy)

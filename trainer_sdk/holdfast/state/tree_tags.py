"""The tags of the typed tree: one per type that JSON has no exact word for. Pure; used by tree.py only.

Each tag says how its payload is written and read. Types are matched exactly (`type(x) is T`): a subclass may carry
behaviour that its base's payload would lose, so it is refused by tree.py.
"""

import base64
import datetime
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.state.errors import UnsupportedStateError
from holdfast.state.tree_numpy import NUMPY_SCALARS, decode_array, decode_scalar, encode_array, encode_scalar
from holdfast_protocol.canonical_json import canonical_bytes

EncodeChild = Callable[[Any, str], Any]
"""(child, what it adds to the path) -> its encoded form."""
DecodeChild = Callable[[Any], Any]

_FACTORIES: dict[str, Any] = {"list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str}


class Tag(NamedTuple):
    """How one type is written: encode(value, path, child) -> payload, decode(payload, child) -> value."""

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
    return [child(item, f"[{at}]") for at, item in enumerate(value)]


def _encode_set(value: Any, path: str, child: EncodeChild) -> list[Any]:
    # A set's own order is salted per process; sorted, the same set gives the same bytes on every rank and save.
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
    except Exception:  # a broken __repr__, or an integer beyond python's limit for text: the path is for people only
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
    # Pairs, not a JSON object: keys keep their type and their order, which canonical JSON would sort.
    Tag("dict", (dict,), _encode_pairs, lambda e, c: dict(_decode_pairs(e, c))),
    Tag("ordered_dict", (OrderedDict,), _encode_pairs, lambda e, c: OrderedDict(_decode_pairs(e, c))),
    Tag("default_dict", (defaultdict,), _encode_defaultdict, _decode_defaultdict),
    Tag("counter", (Counter,), _encode_pairs, _decode_counter),
    Tag("deque", (deque,), lambda v, p, c: [v.maxlen, _encode_items(v, p, c)], _decode_deque),
    Tag("datetime", (datetime.datetime,), _encode_datetime, _decode_datetime),
    Tag("date", (datetime.date,), lambda v, p, c: v.isoformat(), lambda e, c: datetime.date.fromisoformat(e)),
    Tag("time", (datetime.time,), _encode_time, _decode_time),
    Tag("timedelta", (datetime.timedelta,), lambda v, p, c: _encode_delta(v), lambda e, c: datetime.timedelta(*e)),
    # A path is what this machine calls it: PosixPath here, WindowsPath there, so the flavour is not kept.
    Tag("path", (type(pathlib.Path()),), lambda v, p, c: c(str(v), ""), lambda e, c: pathlib.Path(c(e))),
    Tag("dtype", (torch.dtype,), lambda v, p, c: str(v).removeprefix("torch."), _decode_torch_dtype),
    Tag("device", (torch.device,), lambda v, p, c: str(v), lambda e, c: torch.device(e)),
    Tag("array", (np.ndarray,), lambda v, p, c: encode_array(v, p), lambda e, c: decode_array(e)),
    Tag("scalar", NUMPY_SCALARS, lambda v, p, c: encode_scalar(v, p), lambda e, c: decode_scalar(e)),
]

TAGS: dict[str, Tag] = {tag.name: tag for tag in _LIST}
TAGS_BY_TYPE: dict[type, Tag] = {kind: tag for tag in _LIST for kind in tag.types}

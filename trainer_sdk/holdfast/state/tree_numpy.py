"""numpy's arrays and scalars in the typed tree: dtype (byte order included), shape and raw bytes. Pure.

Below tree_tags.py. Arrays come back C-contiguous and writable.
"""

import base64
from math import prod
from typing import Any

import numpy as np

from holdfast.state.errors import UnsupportedStateError

MAX_ARRAY_BYTES = 16 * 1024 * 1024
"""A tree is JSON, sent with every save: large arrays belong into chunks, as tensors."""

_KINDS = "biufcmMSU"
_WIDEST_FLOAT = {"f": 8, "c": 16}

NUMPY_SCALARS: tuple[type, ...] = tuple(
    {np.dtype(code).type for code in np.typecodes["All"] if np.dtype(code).kind in _KINDS}
)


def encode_array(value: "np.ndarray[Any, Any]", path: str) -> list[Any]:
    """[dtype, shape, base64 of the bytes]. Raises UnsupportedStateError for object, structured and long double."""
    _check_dtype(value.dtype, path)
    if value.nbytes > MAX_ARRAY_BYTES:
        raise UnsupportedStateError(
            path, f"a numpy array of {value.nbytes} bytes is too large for the index", "give torch.from_numpy(…) of it"
        )
    return [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes("C")).decode("ascii")]


def decode_array(payload: Any) -> "np.ndarray[Any, Any]":
    """The inverse. Raises ValueError or TypeError for what encode_array does not write."""
    text, shape, data = payload
    dtype = np.dtype(text)
    raw = base64.b64decode(data, validate=True)
    if dtype.kind not in _KINDS or len(raw) != prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of {shape} {text} does not have {len(raw)} bytes")
    array = np.empty(shape, dtype)
    # Through bytes and not element by element: NaN payloads must not pass an FPU.
    if raw:
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(raw, np.uint8)
    return array


def encode_scalar(value: np.generic, path: str) -> list[Any]:
    """[dtype, base64 of the bytes]."""
    _check_dtype(value.dtype, path)
    whole = np.asarray(value)  # an empty text's own dtype has no bytes, which no array can have
    return [whole.dtype.str, base64.b64encode(whole.tobytes()).decode("ascii")]


def decode_scalar(payload: Any) -> np.generic:
    """The inverse. Raises ValueError or TypeError for what encode_scalar does not write."""
    text, data = payload
    scalar: Any = decode_array([text, [], data])[()]
    if not isinstance(scalar, np.generic):
        raise TypeError(f"{text[:80]!r} is not a scalar's dtype")
    return scalar


def _check_dtype(dtype: "np.dtype[Any]", path: str) -> None:
    if dtype.kind not in _KINDS or dtype.itemsize > _WIDEST_FLOAT.get(dtype.kind, dtype.itemsize):
        raise UnsupportedStateError(path, f"numpy dtype {dtype} has no portable form", "convert it to a plain dtype")

"""The bytes of two arrays of one dtype -> their sums, in float64, block by block. The one module with numpy: imported
when something is measured, because no other work of the service needs it.

What is not finite in one of the two is counted, and in no sum: one NaN would make NaN of all of them. Differences of
integers are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_service.comparisons.sums import Sums, held

Array = NDArray[Any]
Floats = NDArray[np.float64]

_BLOCK = 1 << 18
"""Elements at once: their float64 arrays fit into a processor's cache."""


def _float8(exponent_bits: int, bias: int, *nans: int) -> Floats:
    """The value of each of the 256 codes: a sign, an exponent, and the rest a fraction. No code is an infinity."""
    mantissa_bits = 7 - exponent_bits
    codes = np.arange(256)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    values: Floats = np.ldexp(np.where(exponent == 0, fraction, 1 + fraction), np.maximum(exponent, 1) - bias)
    values[128:] *= -1
    values[list(nans)] = np.nan
    return values


_E4M3FN = _float8(4, 7, 0x7F, 0xFF)
_E4M3FNUZ = _float8(4, 8, 0x80)
_E5M2FNUZ = _float8(5, 16, 0x80)
_E8M0FNU = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)


def _as_floats(array: Array) -> Floats:
    return array.astype(np.float64)


_FLOATS: Mapping[str, tuple[str, Callable[[Array], Floats]]] = {
    "float64": ("<f8", _as_floats),
    "float32": ("<f4", _as_floats),
    "float16": ("<f2", _as_floats),
    "bfloat16": ("<u2", lambda array: (array.astype("<u4") << 16).view("<f4").astype(np.float64)),
    # The upper half of a float16.
    "float8_e5m2": ("u1", lambda array: (array.astype("<u2") << 8).view("<f2").astype(np.float64)),
    "float8_e4m3fn": ("u1", lambda array: _E4M3FN[array]),
    "float8_e4m3fnuz": ("u1", lambda array: _E4M3FNUZ[array]),
    "float8_e5m2fnuz": ("u1", lambda array: _E5M2FNUZ[array]),
    "float8_e8m0fnu": ("u1", lambda array: _E8M0FNU[array]),
}
"""How the bytes are viewed, and what makes numbers of them. Complex numbers and two in one byte are not measured."""

_INTEGERS = {
    "bool": "u1",
    "uint8": "u1",
    "int8": "i1",
    "uint16": "<u2",
    "int16": "<i2",
    "uint32": "<u4",
    "int32": "<i4",
    "uint64": "<u8",
    "int64": "<i8",
}


def measure(dtype: str, before: memoryview, after: memoryview) -> Sums:
    """Of the elements' bytes, little-endian, of a dtype that is_measurable. Both have the same number of them."""
    total = Sums()
    view = _FLOATS[dtype][0] if dtype in _FLOATS else _INTEGERS[dtype]
    one, other = np.frombuffer(before, view), np.frombuffer(after, view)
    measure_block = _measure_floats if dtype in _FLOATS else _measure_integers
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, one.size, _BLOCK):
            total.add(measure_block(dtype, one[start : start + _BLOCK], other[start : start + _BLOCK]))
    return total


def _measure_floats(dtype: str, before: Array, after: Array) -> Sums:
    as_floats = _FLOATS[dtype][1]
    one, other = as_floats(before), as_floats(after)
    finite = np.isfinite(one) & np.isfinite(other)
    sums = Sums()
    if not finite.all():
        sums.nan_before, sums.nan_after = int(np.isnan(one).sum()), int(np.isnan(other).sum())
        sums.infinite_before, sums.infinite_after = int(np.isinf(one).sum()), int(np.isinf(other).sum())
        one, other = one[finite], other[finite]
    sums.add(_sums(one, other, np.abs(one - other)))
    sums.elements = before.size
    return sums


def _measure_integers(_dtype: str, before: Array, after: Array) -> Sums:
    unsigned = f"u{before.dtype.itemsize}"
    one, other = before.view(unsigned), after.view(unsigned)
    # The larger less the smaller, modulo 2^n, is their distance: int64 has numbers that float64 cannot tell apart.
    distance = np.where(before > after, one - other, other - one)
    return _sums(_as_floats(before), _as_floats(after), _as_floats(distance))


def _sums(before: Floats, after: Floats, distance: Floats) -> Sums:
    if not before.size:
        return Sums()
    # Not np.dot: a BLAS has threads of its own, which the trainers' calls would wait for.
    before2, after2, difference2, product = (
        held(float(np.einsum("i,i", *pair)))
        for pair in ((before, before), (after, after), (distance, distance), (before, after))
    )
    return Sums(before.size, before2, after2, difference2, product, held(float(distance.max())))


def fill_box(
    array: memoryview, shape: tuple[int, ...], offsets: tuple[int, ...], box_shape: tuple[int, ...], box: memoryview
) -> None:
    """Writes a box of elements into the array of `shape` at `offsets`, whatever the size of an element."""
    into = np.frombuffer(array, np.uint8).reshape(*shape, -1)
    place = tuple(slice(offset, offset + size) for offset, size in zip(offsets, box_shape, strict=True))
    into[place] = np.frombuffer(box, np.uint8).reshape(*box_shape, -1)

"""The ceiling of a save to a mounted store, and of a restore from one: copy, SHA-256 and write, or read, SHA-256 and
copy, on all cores at once. No plan, no catalog, nobody is told.

Each piece is copied to a place of its own, hashed there and written to a file of its own, and back the same way.
`copy_and_hash_cpu_seconds`: the CPU time that copying and hashing alone take.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.measure import used, warm_pages
from benchmarks.spec import Spec
from benchmarks.state import build

_PIECE_BYTES = 16 * 1024 * 1024


class _Piece(NamedTuple):
    address: int
    """Of the tensor's bytes."""
    staged: memoryview
    file: Path


def run(spec: Spec) -> dict[str, Any]:
    state = build(spec.size_bytes)
    staged = memoryview(bytearray(b"\xff" * state.bytes))  # written to, so that its pages are there
    pieces, at = [], 0
    for tensor in state.tensors():
        for start in range(0, tensor.nbytes, _PIECE_BYTES):
            nbytes = min(_PIECE_BYTES, tensor.nbytes - start)
            file = Path(spec.folder) / f"piece-{len(pieces)}"
            pieces.append(_Piece(tensor.data_ptr() + start, staged[at : at + nbytes], file))
            at += nbytes
    saved, restored, hashed = [], [], []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:

        def seconds(one: Callable[[_Piece], None]) -> float:
            began = time.perf_counter()
            list(threads.map(one, pieces))
            return time.perf_counter() - began

        for _ in range(1 + spec.rounds):
            state.change()
            for piece in pieces:
                piece.file.unlink(missing_ok=True)
            warm_pages(state.bytes)
            saved.append(seconds(_save))
            restored.append(seconds(_restore))
            with used({}) as usage:
                for piece in pieces:
                    _copy_and_hash(piece)
            hashed.append(usage.cpu_seconds)
    return {
        "bytes": state.bytes,
        "save_seconds": median(saved[1:]),
        "restore_seconds": median(restored[1:]),
        "copy_and_hash_cpu_seconds": median(hashed[1:]),
    }


def _copy_and_hash(piece: _Piece) -> None:
    ctypes.memmove(_address(piece.staged), piece.address, piece.staged.nbytes)
    hashlib.sha256(piece.staged)


def _save(piece: _Piece) -> None:
    _copy_and_hash(piece)
    piece.file.write_bytes(piece.staged)


def _restore(piece: _Piece) -> None:
    with piece.file.open("rb", buffering=0) as file:
        file.readinto(piece.staged)
    hashlib.sha256(piece.staged)
    ctypes.memmove(piece.address, _address(piece.staged), piece.staged.nbytes)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))

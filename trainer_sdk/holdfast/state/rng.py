"""Every random number generator of this process: capture, restore, or derive anew. Per rank, without being asked.

Restore calls it last: building the model, the loaders and their iterators all draw numbers.
"""

import hashlib
import random
from typing import Any

import numpy as np
import torch

from holdfast.state.errors import StateMismatchError, TreeFormatError
from holdfast.state.tree import decode_tree, encode_tree


def capture_rng() -> Any:
    """The generators of python, numpy, torch's CPU and each CUDA device, as an encoded typed tree. Draws nothing.

    CUDA is asked only where this process uses it already: asking would create a context on every device.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    return encode_tree(
        {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": _to_bytes(torch.get_rng_state()),
            "cuda": [_to_bytes(torch.cuda.get_rng_state(device)) for device in devices],
        },
        path="rng",
    )


def restore_rng(encoded: Any) -> None:
    """Set every generator as it was. Raises TreeFormatError for a malformed tree, before anything is changed.

    Raises StateMismatchError when another number of CUDA devices was in use: no silent half.
    """
    states = decode_tree(encoded)
    if type(states) is not dict or states.keys() != {"python", "numpy", "torch", "cuda"}:
        raise TreeFormatError("the saved random number generators are malformed")
    if states["cuda"] and len(states["cuda"]) != torch.cuda.device_count():
        raise StateMismatchError(
            "rng",
            f"{len(states['cuda'])} CUDA generators were saved, and here are {torch.cuda.device_count()} devices",
            "start with the same CUDA_VISIBLE_DEVICES, or restore with newly derived random numbers",
        )
    before = capture_rng()
    try:
        _set(states)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        _set(decode_tree(before))
        raise TreeFormatError(f"the saved random number generators are malformed: {error}") from error


def derive_rng(run: str, step: int, rank: int) -> None:
    """Seed every generator from (run, step, rank): for another world size, where no rank's state fits.

    The same three values always give the same numbers, and other ranks and steps give unrelated ones.
    """
    digest = hashlib.sha256(f"holdfast-rng-1\n{run}\n{step}\n{rank}\n".encode()).digest()
    random.seed(digest)
    np.random.seed(np.frombuffer(digest, dtype=np.uint32))
    torch.manual_seed(int.from_bytes(digest[:8], "big"))


def _set(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(_to_tensor(states["torch"]))
    for device, state in enumerate(states["cuda"]):
        torch.cuda.set_rng_state(_to_tensor(state), device)


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _to_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)

"""Would transformers load these weights with this config? Its own loader says so, on tensors without memory.

Flow: names, model_files -> **fit** -> folder. transformers is an extra: without it, and for a model whose class it
does not have, the answer is why nobody knows. No code of a checkpoint is run, and nothing is asked of the Hub.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger("holdfast")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """By the model's names. All empty: from_pretrained() takes each weight, and lacks none."""

    model: str
    """Its class."""
    missing: tuple[str, ...] = ()
    """The model has them and the files do not: from_pretrained() would draw them at random."""
    unexpected: tuple[str, ...] = ()
    """The files have them and the model does not: from_pretrained() would ignore them."""
    mismatched: tuple[tuple[str, Shape, Shape], ...] = ()
    """Name, shape in the files, shape by the config."""


@dataclass(frozen=True)
class NotKnown:
    reason: str


def fit_of(config: Mapping[str, Any], weights: Mapping[str, tuple[torch.dtype, Shape]]) -> Fit | NotKnown:
    """`weights`: by the names in the files, as they would be written."""
    try:
        import transformers
    except ImportError:
        return NotKnown('transformers is not installed here (pip install "holdfast[hf]")')
    named = config.get("architectures")
    if not (isinstance(named, list) and named and isinstance(named[0], str)):
        return NotKnown("config.json names no class in `architectures`")
    if "quantization_config" in config:
        return NotKnown("config.json is that of a quantized model")
    try:
        found = getattr(transformers, named[0], None)  # it imports the class's module, which may need more than is here
        if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
            return NotKnown(f"transformers {transformers.__version__} has no {named[0]:.100}")
        kind: Any = found
        with _quiet():
            _, told = kind.from_pretrained(
                None,
                config=kind.config_class.from_dict(dict(config)),
                state_dict={
                    name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in weights.items()
                },
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                local_files_only=True,
                # The config may name a kernel, which transformers would fetch from the Hub and run.
                attn_implementation="eager",
            )
    except Exception as error:  # whatever a model's class makes of a config: it is not known, and no reason to fail
        return NotKnown(f"{named[0]:.100} could not be tried: {type(error).__name__}: {error!s:.300}")
    return Fit(
        kind.__name__,
        missing=tuple(sorted(told["missing_keys"])),
        unexpected=tuple(sorted(told["unexpected_keys"])),
        mismatched=tuple((name, tuple(here), tuple(there)) for name, here, there in sorted(told["mismatched_keys"])),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers reports what it loads to the log and as a bar; here nothing is loaded."""
    from transformers.utils import logging as theirs

    level, bar = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(logging.CRITICAL)
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if bar:
            theirs.enable_progress_bar()

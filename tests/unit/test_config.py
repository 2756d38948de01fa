"""What a script gives as its configuration becomes plain, and no secret leaves the process."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.session.config import read_config
from holdfast_client.errors import ConfigurationError


class Mode(enum.Enum):
    FAST = "fast"


@dataclasses.dataclass
class Optimizer:
    lr: float = 0.1
    betas: tuple[float, ...] = (0.9, 0.95)


class Thing:
    """Its text has an address, which differs from launch to launch."""


def test_it_becomes_plain() -> None:
    given = {
        "optimizer": Optimizer(),
        "args": argparse.Namespace(seed=1, out=Path("runs/a")),
        "dtype": torch.bfloat16,
        "mode": Mode.FAST,
        "number": np.float32(0.5),
        "clip": float("inf"),
        "set": {"b", "a"},
        "thing": Thing(),
        3: None,
        "tensor": torch.tensor(2.0),
    }
    assert read_config(given) == {
        "optimizer": {"lr": 0.1, "betas": [0.9, 0.95]},
        "args": {"seed": 1, "out": "runs/a"},
        "dtype": "torch.bfloat16",
        "mode": "fast",
        "number": 0.5,
        "clip": "inf",
        "set": ["a", "b"],
        "thing": f"<{__name__}.Thing>",
        "3": None,
        "tensor": "tensor(2.)",
    }


def test_secrets_stay_here() -> None:
    given = {
        "wandb": {"api_key": "k", "API-KEY": "k", "project": "p"},
        "hf_token": "t",
        "aws.secret": b"s",
        "credentials": {"user": "u", "value": "s"},
        "passwords": ["s"],
        "wandbApiKey": "k",
        "authToken": "t",
        "data_url": "postgresql://u:s@host/db?x=1",
        "secret_count": 2,
        "api_keys": 3,
        "special_tokens": ["<s>", "</s>"],
        "tokenizer": "bpe",
        "max_tokens": 4096,
        "pad_token": "<pad>",
    }
    told = read_config(given)
    assert told["wandb"] == {"api_key": "(left out)", "API-KEY": "(left out)", "project": "p"}
    assert (told["hf_token"], told["aws.secret"]) == ("(left out)", "(left out)")
    for key in ("credentials", "passwords", "wandbApiKey", "authToken"):
        assert told[key] == "(left out)", key
    assert told["data_url"] == "postgresql://***@host/db?x=1"
    assert (told["secret_count"], told["api_keys"], told["special_tokens"]) == (2, 3, ["<s>", "</s>"])
    assert (told["tokenizer"], told["max_tokens"]) == ("bpe", 4096)


def test_files(tmp_path: Path) -> None:
    config = {"lr": 0.1, "layers": [1, 2]}
    (tmp_path / "c.json").write_text(json.dumps(config))
    (tmp_path / "c.yaml").write_text("lr: 0.1\nlayers: [1, 2]\n")
    assert read_config(str(tmp_path / "c.json")) == read_config(tmp_path / "c.yaml") == config
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.yml").write_text("a: [")
    (tmp_path / "c.toml").write_text("")
    (tmp_path / "list.json").write_text("[1]")
    for name, said in {
        "none.json": "No such file",
        "bad.json": "cannot be read",
        "bad.yml": "cannot be read",
        "c.toml": "ends in",
        "list.json": "Give a map",
    }.items():
        with pytest.raises(ConfigurationError, match=said):
            read_config(tmp_path / name)


@pytest.mark.parametrize(("given", "said"), [(7, "Give a map"), ({"a": "x" * 70_000}, "65536 are the most")])
def test_what_cannot_be_kept_says_so(given: object, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        read_config(given)


def test_one_that_holds_itself_is_refused() -> None:
    given: dict[str, object] = {}
    given["self"] = given
    with pytest.raises(ConfigurationError, match="levels deep"):
        read_config(given)

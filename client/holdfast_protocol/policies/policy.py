"""Policies: a project's, or one run's, wishes to a controller. Data, checked when it is put.

`GET    /v1/projects/{project}/policies/{kind}`                                     -> PolicyView
`PUT    /v1/projects/{project}/policies/{kind}`             (If-Match) PutPolicy    -> PolicyView
`DELETE /v1/projects/{project}/policies/{kind}`             (If-Match)              -> PolicyView (the deleted one)
`GET    /v1/projects/{project}/runs/{run}/policies/{kind}`  the effective one       -> PolicyView
`PUT    /v1/projects/{project}/runs/{run}/policies/{kind}`  (If-Match) PutPolicy    -> PolicyView
`DELETE /v1/projects/{project}/runs/{run}/policies/{kind}`  (If-Match)              -> PolicyView (the deleted one)

A run's own policy replaces the project's as a whole. Each kind has a model in POLICY_MODELS.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails, to_json

from holdfast_protocol.base import Reply, Request, example
from holdfast_protocol.copies import CopyPolicy, ObjectivesPolicy
from holdfast_protocol.policies.retention import RetentionPolicy
from holdfast_protocol.tiers import TierPolicy


class PolicyKind(StrEnum):
    RETENTION = "retention"
    COPIES = "copies"
    TIERS = "tiers"
    OBJECTIVES = "objectives"


POLICY_MODELS: dict[PolicyKind, type[Request]] = {
    PolicyKind.RETENTION: RetentionPolicy,
    PolicyKind.TIERS: TierPolicy,
    PolicyKind.COPIES: CopyPolicy,
    PolicyKind.OBJECTIVES: ObjectivesPolicy,
}

_SHOWN_ERRORS = 5
_MOST_FAULTS = 20


@dataclass(frozen=True)
class PolicyFault:
    """`where`: the way to a field of the document; empty: the document as a whole."""

    where: tuple[str, ...]
    message: str


class PolicyError(ValueError):
    """The document is not a policy of this kind. The message names each wrong field and says what to do; `faults` has
    them one by one, for a form."""

    def __init__(self, message: str, faults: Sequence[PolicyFault] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults)


class PutPolicy(Request):
    model_config = example({"document": {"keep_last": 3, "keep_within": "6h", "keep_within_daily": "7d"}})

    document: dict[str, Any] = Field(description="The policy itself: a document of the kind's model.")


class PolicyView(Reply):
    kind: PolicyKind
    project: str
    run: str | None = Field(description="The run that it was put for; null: the project's policy.")
    level: Literal["project", "run"] = Field(description="The level that it was put at.")
    document: dict[str, Any]
    version: int
    etag: str
    updated_at: datetime
    updated_by: str


def read_policy(kind: PolicyKind, document: Mapping[str, Any]) -> Request:
    """The document as its kind's model. Raises PolicyError."""
    model = POLICY_MODELS[kind]
    # restic's users write keep-last.
    known = {name.replace("-", "_") if isinstance(name, str) else name: value for name, value in document.items()}
    try:
        return model.model_validate_json(to_json(known), strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
    told = [_told(kind, model, each) for each in found[:_MOST_FAULTS]]
    sentences = [sentence for _, sentence in told[:_SHOWN_ERRORS]]
    if len(found) > _SHOWN_ERRORS:
        sentences.append(f"And {len(found) - _SHOWN_ERRORS} more.")
    raise PolicyError(" ".join(sentences), [fault for fault, _ in told])


def _told(kind: PolicyKind, model: type[Request], error: ErrorDetails) -> tuple[PolicyFault, str]:
    """The fault, and the sentence that tells it."""
    where = tuple(str(part) for part in error["loc"])
    field = ".".join(where)
    if error["type"] == "extra_forbidden" and len(where) == 1:
        close = difflib.get_close_matches(field, model.model_fields, n=1, cutoff=0.5)
        meant = f"did you mean {close[0]}?" if close else f"it has {', '.join(model.model_fields)}."
        sentence = f"A {kind} policy has no {field}; {meant}"
        return PolicyFault(where, sentence), sentence
    message = error["msg"].removeprefix("Value error, ").rstrip(".")
    alone = f"{message[:1].upper()}{message[1:]}."
    return PolicyFault(where, alone), f"{field}: {message}." if field else alone

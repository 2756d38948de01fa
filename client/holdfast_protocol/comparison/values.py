"""How far apart the tensors of two checkpoints are: a worker reads those that differ, and measures.

`POST /v1/checkpoints/{id}/comparisons {against}`   -> OperationView; its result is a ValuesCompared
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from holdfast_protocol.base import Reply, Request, example

MOST_TENSORS = 1000


class CompareValues(Request):
    """Read the tensors that differ from an earlier checkpoint, and measure how far apart they are."""

    model_config = example({"against": "ck_0123456789abcdef0123456789abcdef", "most_tensors": 100, "dry_run": True})

    against: str = Field(max_length=200, description="The id of the one before.")
    most_tensors: int = Field(
        default=100,
        ge=1,
        le=MOST_TENSORS,
        description="How many tensors the result names, those of the largest relative change. All are measured.",
    )
    dry_run: bool = Field(default=False, description="Only tell which tensors would be read, and how many bytes.")


class Measured(Reply):
    """Norms are L2, in float64, over the elements that are finite in both checkpoints. A norm is null if float64 cannot
    hold it."""

    elements: int
    norm_before: float | None
    norm_after: float | None
    norm_difference: float | None
    relative_change: float | None = Field(
        description="`norm_difference` over `norm_before`; null if that is 0 while the difference is not."
    )
    largest_difference: float | None = Field(description="The largest absolute difference of two elements.")
    cosine: float | None = Field(description="Null if a norm is 0.")
    nan_before: int
    nan_after: int
    infinite_before: int
    infinite_after: int


class TensorMeasured(Measured):
    name: str
    component: str
    dtype: str
    shape: list[int]


class ComponentMeasured(Measured):
    """All of a component's tensors that differ, taken for one vector."""

    name: str
    tensors: int


class NotCompared(Reply):
    name: str
    reason: Literal["dtype", "damaged", "layout"] = Field(
        description="`dtype`: it is no real number of a known kind. `damaged`: a chunk of it cannot be read, and is "
        "read again. `layout`: the two saves cut it so differently that it takes too much memory or too many reads."
    )


class ValuesCompared(Reply):
    """The result of an operation of kind `compare`. A tensor that is tied to another one is told with that one."""

    before: str = Field(description="The checkpoints' ids.")
    after: str
    bytes_to_read: int = Field(description="Of chunks, decoded. A chunk that is needed at two moments counts twice.")
    read_bytes: int = Field(description="What was read, after the last interruption too; 0 of a dry run.")
    only_before: int = Field(description="How many tensors are in the earlier checkpoint alone. These are not read.")
    only_after: int
    other_form: int = Field(description="How many have another dtype or shape. These are not read.")
    equal: int = Field(description="How many are equal, told by digests, or after reading.")
    differing: int = Field(description="How many have other bytes. Of a dry run: how many would be read.")
    tensors: list[TensorMeasured] = Field(
        description="Of those that differ, the largest relative change first; before them those with other counts of "
        "NaN or infinity, and those that were 0."
    )
    components: list[ComponentMeasured]
    not_compared: list[NotCompared] = Field(description="By name; no more than `tensors` may be.")
    not_compared_left_out: int

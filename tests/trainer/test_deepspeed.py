"""DeepSpeed's engine: killed, resumed bit for bit with ZeRO 1 to 3, and the same bytes on another number of ranks."""

from __future__ import annotations

import importlib.util

import pytest
from tests.support.ranks import launched, read_until
from tests.trainer.conftest import Service

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: docs/integrations.md"
    ),
]
RANK = "tests.support.deepspeed_rank"


def trained(run: str, *arguments: object, world_size: int = 2) -> list[tuple[list[str], list[str]]]:
    """What each rank says of its restore, and of its training."""
    with launched(RANK, run, *arguments, world_size=world_size) as ranks:
        lines = [read_until(rank, "trained") for rank in ranks]
    return [(next(line for line in said if line.startswith("restored")).split(), said[-1].split()) for said in lines]


@pytest.mark.timeout(900)  # DeepSpeed compiles an operator at its first start on a machine
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_killed_job_resumes_bit_for_bit_and_another_number_of_ranks_gets_the_same_bytes(
    run: str, service: Service, stage: int, dtype: str
) -> None:
    project, name = run.split("/")
    service.client.runs.create(project, f"{name}-whole")
    whole = trained(f"{run}-whole", stage, dtype, 5, -1)
    with launched(RANK, run, stage, dtype, 5, 1, world_size=2) as ranks:
        for rank in ranks:
            assert rank.wait(timeout=300) == -9
    resumed = trained(run, stage, dtype, 5, -1)
    for (_, straight), (restored, then) in zip(whole, resumed, strict=True):
        assert restored[1] == "2"
        assert then[1] == straight[1]
        assert then[2:] == straight[4:], "the losses after the resume"
    for world_size in (1, 2):
        said = trained(run, stage, dtype, 5, -1, world_size=world_size)
        assert {restored[2] for restored, _ in said} == {resumed[0][1][1]}

"""FSDP1 by its state-dict types, through a job's own dcp.save: killed and resumed bit for bit, on other ranks too."""

from __future__ import annotations

import pytest
from tests.support.ranks import launched, read_until
from tests.trainer.conftest import Service

RANK = "tests.support.fsdp1_rank"


def trained(run: str, *arguments: object, world_size: int = 2) -> list[list[list[str]]]:
    with launched(RANK, run, *arguments, world_size=world_size) as ranks:
        lines = [read_until(rank, "trained") for rank in ranks]
    return [[line.split() for line in said if line.startswith(("restored", "trained"))] for said in lines]


@pytest.mark.rule("writer-is-whole")
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_killed_job_with_fsdp1_resumes_bit_for_bit_and_on_another_number_of_ranks(
    run: str, service: Service, kind: str
) -> None:
    project, name = run.split("/")
    service.client.runs.create(project, f"{name}-whole")
    whole = trained(f"{run}-whole", kind, 5, -1)
    with launched(RANK, run, kind, 5, 1, world_size=2) as ranks:
        for rank in ranks:
            assert rank.wait(timeout=120) == -9
    resumed = trained(run, kind, 5, -1)
    for [straight], [restored, then] in zip(whole, resumed, strict=True):
        assert restored[1] == "2"
        assert then[1] == straight[1]
        assert then[2:] == straight[4:], "the losses after the resume"
    [[restored, _]] = trained(run, kind, 5, -1, world_size=1)
    assert restored[1:] == ["5", resumed[0][1][1]]

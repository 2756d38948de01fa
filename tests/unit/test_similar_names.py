"""Which new run names look mistyped, as a table."""

from __future__ import annotations

import pytest

from holdfast_service.training.mistyped_names import looks_mistyped, similar_names

MISTYPED = [
    ("demo/gtp", "demo/gpt", "two letters exchanged"),
    ("demo/gt", "demo/gpt", "a letter missing"),
    ("demo/gppt", "demo/gpt", "a letter too many"),
    ("demo/gpr", "demo/gpt", "a wrong letter"),
    ("demo/pgt", "demo/gpt", "at the beginning"),
    ("demo/my_run", "demo/my-run", "another separator"),
    ("demo/myrun", "demo/my-run", "a separator missing"),
    ("demo/llama3-1", "demo/llama-3-1", "a separator missing before a digit"),
    ("demo/GPT", "demo/gpt", "another case"),
    ("dmeo/gpt", "demo/gpt", "in the project"),
    ("demo/baseline-a", "demo/basline-a", "inside a long word"),
]
DELIBERATE = [
    ("demo/gpt", "demo/gpt", "the same"),
    ("demo/gpt-2", "demo/gpt-1", "another digit"),
    ("demo/gpt-10", "demo/gpt-1", "a digit more"),
    ("demo/gpt2", "demo/gpt", "a digit more, in a word"),
    ("demo/gptl", "demo/gpt1", "a letter for a digit"),
    ("demo/run-b", "demo/run-a", "a word of one letter"),
    ("demo/run-ab", "demo/run-ac", "a word of two letters"),
    ("demo/small", "demo/large", "more than one edit"),
    ("demo/gpt-small", "demo/gpt", "another word"),
    ("demo/tpg", "demo/gpt", "two edits"),
    ("other/gpt", "demo/gpt", "another project"),
]


@pytest.mark.parametrize(("name", "existing", "why"), MISTYPED)
def test_one_slip_of_the_finger_is_a_typo(name: str, existing: str, why: str) -> None:
    assert looks_mistyped(name, existing), why
    assert looks_mistyped(existing, name), why


@pytest.mark.parametrize(("name", "existing", "why"), DELIBERATE)
def test_what_people_name_on_purpose_is_not(name: str, existing: str, why: str) -> None:
    assert not looks_mistyped(name, existing), why
    assert not looks_mistyped(existing, name), why


def test_all_that_may_be_meant_are_named_in_order() -> None:
    assert similar_names("demo/gpt", ["demo/gptx", "demo/gpt2", "demo/gtp"]) == ["demo/gptx", "demo/gtp"]

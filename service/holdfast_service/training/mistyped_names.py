"""Whether a run's name is a slip of the finger for another one's (rule no-silent-fresh-start)."""

from __future__ import annotations

from collections.abc import Iterable

_SHORTEST_WORD = 3


def similar_names(name: str, existing: Iterable[str]) -> list[str]:
    """Those of `existing` that `name` may have been meant to be, sorted. Names are `project/run`."""
    return sorted(other for other in existing if looks_mistyped(name, other))


def looks_mistyped(name: str, existing: str) -> bool:
    """Whether a run's name looks like a mistyped one of a run that is there. Pure.

    One slip of the finger (a letter or a separator too many, missing, wrong, or two exchanged) inside a word of three
    or more letters is a typo, and so is another case. People differ in digits and in words of one or two letters on
    purpose: gpt-1 and gpt-2, run-a and run-b.
    """
    if name == existing:
        return False
    if name.lower() == existing.lower():
        return True
    edit = _single_edit(name, existing)
    if edit is None:
        return False
    start, ours, theirs = edit
    if any(letter.isdigit() for letter in ours + theirs):
        return False
    return max(_letters_around(name, start, len(ours)), _letters_around(existing, start, len(theirs))) >= _SHORTEST_WORD


def _single_edit(name: str, other: str) -> tuple[int, str, str] | None:
    """Where two names differ and in what: `(position, part of name, part of other)`, if one edit makes them equal."""
    shorter = min(len(name), len(other))
    start = next((i for i in range(shorter) if name[i] != other[i]), shorter)
    end = next((i for i in range(shorter - start) if name[-1 - i] != other[-1 - i]), shorter - start)
    ours, theirs = name[start : len(name) - end], other[start : len(other) - end]
    one_more_or_less = len(ours) + len(theirs) == 1
    one_other = len(ours) == len(theirs) == 1
    exchanged = len(ours) == 2 and ours == theirs[::-1]
    return (start, ours, theirs) if one_more_or_less or one_other or exchanged else None


def _letters_around(name: str, start: int, length: int) -> int:
    """How many letters the word (or, around a separator, the two words) at this place have together."""
    before = start
    while before > 0 and name[before - 1].isalpha():
        before -= 1
    after = start + length
    while after < len(name) and name[after].isalpha():
        after += 1
    return sum(letter.isalpha() for letter in name[before:after])

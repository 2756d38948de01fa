"""Text that is safe to keep and show: without control characters that a terminal obeys, and without secrets.
Numbers with their noun, and lists of hosts.

Used before anything else is loaded (`holdfast --help`), so it imports no library.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice

from holdfast_protocol.states import CredentialKind

# NUL and halves of surrogate pairs: no database keeps them. Other control characters, among them the beginning of every
# escape sequence: a terminal obeys them. Marks of direction and the two separators: they change how text appears.
_NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_LINE_BREAKS = re.compile("[\t\n]")


def is_text(text: str, *, one_line: bool) -> bool:
    return _NOT_TEXT.search(text) is None and not (one_line and _LINE_BREAKS.search(text))


def printable(text: str, *, one_line: bool = False) -> str:
    """`text` with a mark in place of each such character; with `one_line`, a blank for each tab and line break."""
    whole = _NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", text)
    return _LINE_BREAKS.sub(" ", whole) if one_line else whole


# Each looks at a letter a fixed number of times: the text may be a stranger's, and the log takes secrets out of it.
_USER_OF_URL = re.compile(r"(?<=[A-Za-z0-9+.-])://[^\s/@'\"]+@")
_WORD = re.compile(r"[^\s'\"]+")
_SECRETS = (
    (re.compile(rf"({'|'.join(CredentialKind)})_[0-9a-f]{{16}}_[0-9a-zA-Z]+"), r"\1_***"),
    (re.compile(r"whsec_[A-Za-z0-9+/=]+"), "whsec_***"),
)


def without_secrets(text: str) -> str:
    """`text` without URLs' queries and passwords, and without our tokens, sessions, codes and webhooks' secrets: any
    error message may hold a signed URL. Idempotent; its time is linear in the text."""
    text = _WORD.sub(_without_query, without_users(text))
    for secret, instead in _SECRETS:
        text = secret.sub(instead, text)
    return text


def without_users(text: str) -> str:
    """`text` without the user and password of each URL."""
    return _USER_OF_URL.sub("://***@", text)


def _without_query(word: re.Match[str]) -> str:
    """A URL or a path: its query begins at the first question mark behind a slash."""
    slash = word[0].find("/")
    mark = word[0].find("?", slash)
    return f"{word[0][:mark]}?***" if 0 <= slash < mark < len(word[0]) - 1 else word[0]


def counted(count: int, one: str, more: str | None = None) -> str:
    """`1 chunk`, `2 chunks`. `more` is the word for any other number than one; without it, `one` and an s."""
    return f"{count} {one if count == 1 else more or one + 's'}"


# Lists of hosts in Slurm's notation: `node-[017-019,031],gpu7` is five hosts. A job of 500 hosts tells them in one fact
# of its environment.

_NUMBERED = re.compile(r"(.*?)([0-9]{1,12})([^0-9]*)")
_ITEM = re.compile(r"([^,\[\]]*)(?:\[([0-9,-]+)\]([^,\[\]]*))?(?:,|\Z)")
_RANGE = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12}))?")


def fold_hosts(hosts: Iterable[str], *, most_characters: int) -> str:
    """The list of `hosts`; of so many that it would be longer, the first by name. A name that no host has, with a comma
    or a bracket, is left out."""
    names = sorted({host for host in hosts if host and not re.search(r"[,\[\]]", host)})
    while len(text := _folded(names)) > most_characters:
        names = names[: len(names) * 3 // 4]
    return text


def unfold_hosts(text: str, *, most: int) -> list[str]:
    """The hosts of a list, at most so many. What is no list has no hosts."""
    return list(islice(_unfolded(text), most))


def _folded(names: list[str]) -> str:
    numbers: dict[tuple[str, str, int], list[int]] = defaultdict(list)  # by what stands around, and how many digits
    plain: list[str] = []
    for name in names:
        if found := _NUMBERED.fullmatch(name):
            before, digits, after = found.groups()
            numbers[before, after, len(digits)].append(int(digits))
        else:
            plain.append(name)
    for (before, after, width), members in numbers.items():
        ranges = [
            f"{first:0{width}}" if first == last else f"{first:0{width}}-{last:0{width}}"
            for first, last in _ranges(sorted(members))
        ]
        inner = ",".join(ranges)
        plain.append(f"{before}{inner}{after}" if len(members) == 1 else f"{before}[{inner}]{after}")
    return ",".join(plain)


def _ranges(numbers: list[int]) -> Iterator[tuple[int, int]]:
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def _unfolded(text: str) -> Iterator[str]:
    place = 0
    while place < len(text):
        found = _ITEM.match(text, place)
        if found is None:
            return
        before, inner, after = found.groups()
        if inner is None:
            if before:
                yield before
        else:
            for each in _RANGE.finditer(inner):
                first, last = each[1], each[2] or each[1]
                for number in range(int(first), int(last) + 1):
                    yield f"{before}{number:0{len(first)}}{after}"
        place = found.end()

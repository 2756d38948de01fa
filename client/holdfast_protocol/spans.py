"""Spans of time as restic writes them, for policies: `6h`, `7d`, `3m`, `1y6m`. Pure.

Calendar units: a month before 31 March is the end of February. There are no minutes, so `3m` has one meaning.
"""

from __future__ import annotations

import calendar
import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated

from pydantic import AfterValidator

_SPAN = re.compile(
    r"(?=\S)(?:(?P<y>\d{1,3})y)?(?:(?P<m>\d{1,4})m)?(?:(?P<w>\d{1,4})w)?(?:(?P<d>\d{1,5})d)?(?:(?P<h>\d{1,6})h)?"
)
_EARLIEST_YEAR = 1


@dataclass(frozen=True)
class Span:
    months: int
    days: int
    hours: int

    def before(self, moment: datetime) -> datetime:
        """The moment that lies this span earlier; the earliest there is, where the calendar ends."""
        month = moment.year * 12 + moment.month - 1 - self.months
        year, month = divmod(month, 12)
        if year < _EARLIEST_YEAR:
            return datetime.min.replace(tzinfo=moment.tzinfo)
        day = min(moment.day, calendar.monthrange(year, month + 1)[1])
        try:
            return moment.replace(year=year, month=month + 1, day=day) - timedelta(days=self.days, hours=self.hours)
        except OverflowError:
            return datetime.min.replace(tzinfo=moment.tzinfo)


def parse_span(text: str) -> Span:
    """`1y6m`, `2w`, `7d`, `6h` -> Span; units in this order, each once. Raises ValueError."""
    match = _SPAN.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a span of time; write for example 6h, 7d, 4w, 3m (months) or 1y6m, and no minutes"
        )
    number = {unit: int(count or 0) for unit, count in match.groupdict().items()}
    if not any(number.values()):
        raise ValueError(f"{text!r} is no time at all; leave the rule out instead")
    return Span(number["y"] * 12 + number["m"], number["w"] * 7 + number["d"], number["h"])


def _checked(text: str) -> str:
    parse_span(text)
    return text


SpanText = Annotated[str, AfterValidator(_checked)]

"""What the exit status of `holdfast` says. Scripts rely on it: a code never changes its meaning.

| code | meaning |
| --- | --- |
| 0 | done |
| 1 | failed for another reason, which stands on stderr |
| 2 | the command line or a setting is wrong |
| 3 | what was named is not there, or there is no restore point |
| 4 | the token is missing, wrong, expired, or may not do this |
| 5 | the service or its store cannot be reached; try again |
| 6 | bytes are not what they should be |
| 7 | a newer attempt has taken over, or it was changed in between |
| 75 | `holdfast run`: the job was preempted; launch it again |
| 76 | `holdfast run`: nobody has told how the job ended; launch it again, and look if it happens again |
| 79 | `holdfast run`: another launch has taken over the run; do not launch this one again |

75 is EX_TEMPFAIL of sysexits.h, as batch systems know it. Where each node runs its own `holdfast run`, srun reports the
highest code: that is why "do not" is above the other two.
"""

from __future__ import annotations

from enum import IntEnum

from holdfast_client.errors import (
    ConfigurationError,
    Conflict,
    HoldfastError,
    IntegrityError,
    InvalidRequest,
    NotFound,
    ServiceUnavailable,
    StaleAttempt,
    TokenProblem,
)


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    TOKEN = 4
    UNAVAILABLE = 5
    INTEGRITY = 6
    STALE = 7
    PREEMPTED = 75
    UNKNOWN = 76
    FENCED = 79


_BY_KIND: tuple[tuple[type[HoldfastError], ExitCode], ...] = (
    (ConfigurationError, ExitCode.USAGE),
    (InvalidRequest, ExitCode.USAGE),
    (NotFound, ExitCode.NOT_FOUND),
    (TokenProblem, ExitCode.TOKEN),
    (ServiceUnavailable, ExitCode.UNAVAILABLE),
    (IntegrityError, ExitCode.INTEGRITY),
    (StaleAttempt, ExitCode.STALE),
    (Conflict, ExitCode.STALE),
)


def exit_code_of(error: HoldfastError) -> ExitCode:
    return next((code for kind, code in _BY_KIND if isinstance(error, kind)), ExitCode.FAILED)

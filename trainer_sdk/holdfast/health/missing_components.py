"""Components of the run's first checkpoint that the saved state lacks: a warning, or with `strict` an error.

A scheduler that a script forgot to pass on is missed only at the resume that needs it. The components of all ranks
count together, because one rank may have components that the others lack.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from holdfast.errors import MissingComponent
from holdfast.state.components import HF_FILES

log = logging.getLogger("holdfast")


class Completeness:
    """One job's. The run's first checkpoint is this job's own if none was committed before."""

    def __init__(self, *, drop: Iterable[str], strict: bool, speaks: bool) -> None:
        """`drop`: components that are left out on purpose. `speaks`: on rank 0."""
        self._dropped = frozenset(drop)
        self._strict = strict
        self._speaks = speaks
        self._declared: frozenset[str] | None = None
        self._said: set[frozenset[str]] = set()

    def left_out(self, declared: Iterable[str]) -> frozenset[str]:
        """What need not be there: `drop`, and config and tokenizer that an import brought, as no job resumes from
        these."""
        return self._dropped | ({HF_FILES} & set(declared))

    def check(self, has: Iterable[str], declared: Iterable[str]) -> None:
        """`has`: of all ranks; `declared`: by the service, empty before the first commit. The same on all ranks. Raises
        MissingComponent with `strict`; else each set of them is logged once."""
        has = frozenset(has)
        if self._declared is None:
            self._declared = frozenset(declared) or has
        missing = self._declared - has - self.left_out(self._declared)
        if not missing or missing in self._said:
            return
        names = ", ".join(map(repr, sorted(missing)))
        what = f"The state lacks {names}, which the first checkpoint of this run has"
        if self._strict:
            raise MissingComponent(what)
        self._said.add(missing)
        if self._speaks:
            log.warning("%s. It is saved without. %s", what, MissingComponent.remedy)

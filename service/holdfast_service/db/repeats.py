"""A call that makes something, sent twice: the client's Idempotency-Key says that it is the same call.

    repeat = Repeatable(caller.token_id, key, digest_of("token", request=request))
    earlier = repeat.earlier(session)     # the id of what the first call has made; None for the first call
    ...
    repeat.made(session, token.id)        # in the same transaction as what was made

The row is written before the work. So of two calls at once the second waits for the first, and a call that fails
leaves no row. The service forgets keys after KEPT_FOR.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import timedelta

from pydantic import BaseModel
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from holdfast_protocol.digests import canonical_bytes
from holdfast_protocol.problems import ProblemCode
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.tables.operations import IdempotencyKey
from holdfast_service.errors import ProblemError

KEPT_FOR = timedelta(days=7)


def digest_of(what: str, *subject: str | None, request: BaseModel | None = None) -> str:
    """The digest of what a call asks for. `request`: its body, if it has one."""
    asked = [what, list(subject), None if request is None else request.model_dump(mode="json")]
    return hashlib.sha256(canonical_bytes(asked)).hexdigest()


@dataclass(frozen=True)
class Repeatable:
    """Whose call it is, the key that the client gave it, and a digest of what it asks for. Without a key nothing is
    looked up or kept."""

    token_id: str
    key: str | None
    asked: str

    def earlier(self, session: Session) -> str | None:
        """Raises `idempotency_key_reused` where the key was sent with another call."""
        if self.key is None:
            return None
        row = {
            "token_id": self.token_id,
            "key": self.key,
            "asked": self.asked,
            "made_id": None,
            "created_at": database_now(session),
        }
        found = None
        while found is None:  # between the two statements the service may forget a key that is a week old
            insert_absent(session, IdempotencyKey, [row])
            found = session.execute(
                select(IdempotencyKey.asked, IdempotencyKey.made_id).where(
                    IdempotencyKey.token_id == self.token_id, IdempotencyKey.key == self.key
                )
            ).one_or_none()
        if found.asked != self.asked:
            raise ProblemError(
                ProblemCode.IDEMPOTENCY_KEY_REUSED,
                "This Idempotency-Key was sent with another call. Take a new one for each thing that is to be made.",
            )
        earlier: str | None = found.made_id
        return earlier

    def made(self, session: Session, made_id: str) -> None:
        if self.key is not None:
            session.execute(
                update(IdempotencyKey)
                .where(IdempotencyKey.token_id == self.token_id, IdempotencyKey.key == self.key)
                .values(made_id=made_id),
                execution_options={"synchronize_session": False},
            )


def already_made(noun: str, made_id: str) -> ProblemError:
    """For what has a secret that only the first reply showed."""
    return ProblemError(
        ProblemCode.ALREADY_MADE,
        f"The first call with this Idempotency-Key has made the {noun} {made_id}, and only its reply showed the "
        f"secret. If that reply was lost, delete {made_id} and make another one with a new key.",
        id=made_id,
    )

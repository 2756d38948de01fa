"""Whether two tokens may be one person's, as far as the catalog can tell: who can make tokens could otherwise release
what he holds himself, with a second one.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Session

from holdfast_service.catalog.tables import Token


def why_same_line(session: Session, token_id: str, placed_by: str, placed_at: datetime) -> str | None:
    """What the token has to do with the one that placed a hold, or None: it is that one, descends from it or has made
    it, at whatever depth; or it descends from what a maker of that one has made after the hold."""
    if token_id == placed_by:
        return "has placed this hold"
    releasing, placing = _with_makers(session, token_id), _with_makers(session, placed_by)
    if placed_by in releasing:
        return "was made by the one that has placed this hold"
    if token_id in placing:
        return "has made the one that has placed this hold"
    for token in releasing.values():
        if token.created_by_token in placing and token.created_at >= placed_at:
            return "was made after this hold, by who has made the one that has placed it"
    return None


def _with_makers(session: Session, token_id: str) -> dict[str, Token]:
    """The token, who made it, and so on; by id. Of a catalog that was rebuilt the tokens are gone."""
    found: dict[str, Token] = {}
    next_id: str | None = token_id
    while next_id is not None and next_id not in found:
        token = session.get(Token, next_id)
        if token is None:
            break
        found[token.id] = token
        next_id = token.created_by_token
    return found

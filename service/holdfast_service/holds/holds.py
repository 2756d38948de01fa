"""Holds on a checkpoint: placed, extended, released and listed."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import Select, exists, select, tuple_
from sqlalchemy.orm import Session, aliased

from holdfast_protocol.base import Page
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.pruning import ExtendHold, HoldKind, HoldView, PlaceHold, ReleaseHold
from holdfast_protocol.states import CheckpointState
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.pages import cut_page, decode_cursor, moment_from_text, moment_to_text
from holdfast_service.db.repeats import Repeatable, digest_of
from holdfast_service.db.tables.core import Checkpoint, Project, Run, Token
from holdfast_service.db.tables.operations import AuditEvent, Hold
from holdfast_service.errors import ProblemError
from holdfast_service.holds.held import in_force
from holdfast_service.runs.views import checkpoint_by_id, locked_checkpoint, project_named, run_named
from holdfast_service.stores.base import LockingStore

# How a hold is shown, and the way from its id to its rows.


def with_names() -> Select[Hold, Checkpoint, Run, Project]:
    return (
        select(Hold, Checkpoint, Run, Project)
        .join(Checkpoint, Checkpoint.id == Hold.checkpoint_id)
        .join(Run, Run.id == Checkpoint.run_id)
        .join(Project, Project.id == Run.project_id)
    )


def is_in_force(hold: Hold, now: datetime) -> bool:
    """As `holds.held.in_force` says of rows. `now` is the database's."""
    return hold.released_at is None and (hold.retain_until is None or hold.retain_until > now)


def hold_view(hold: Hold, checkpoint: Checkpoint, run: Run, project: Project, now: datetime) -> HoldView:
    holds = is_in_force(hold, now)
    return HoldView(
        id=hold.id,
        checkpoint_id=checkpoint.id,
        project=project.name,
        run=run.name,
        step=checkpoint.step,
        attempt=checkpoint.attempt_number,
        kind=HoldKind(hold.kind),
        reason=hold.reason,
        retain_until=hold.retain_until,
        in_force=holds,
        mirror=hold.mirror,
        mirrored_at=hold.mirrored_at if holds else None,
        mirror_error=hold.mirror_error if holds else None,
        placed_at=hold.placed_at,
        placed_by=hold.placed_by,
        released_at=hold.released_at,
        released_by=hold.released_by,
        release_reason=hold.release_reason,
    )


def locked_hold(session: Session, caller: Principal, hold_id: str) -> tuple[Hold, Checkpoint, Run, Project]:
    """The hold under its checkpoint's lock, as it is now. Raises `hold_not_found`, also for another project's."""
    row = session.execute(with_names().where(Hold.id == hold_id)).one_or_none()
    if row is None or not caller.sees_project(row.Project.id):
        raise ProblemError(
            ProblemCode.HOLD_NOT_FOUND,
            f"There is no hold {hold_id[:60]!r}. Correct the id; `holdfast holds list` shows them.",
        )
    # A transaction that takes a checkpoint away holds the same lock, and asks for holds behind it.
    locked_checkpoint(session, row.Checkpoint.id)
    hold = session.execute(
        select(Hold).where(Hold.id == hold_id), execution_options={"populate_existing": True}
    ).scalar_one()
    return hold, row.Checkpoint, row.Run, row.Project


# Whether two tokens may be one person's, as far as the catalog can tell: who can make tokens could otherwise release
# what he holds himself, with a second one.


def why_same_line(session: Session, token_id: str, hold: Hold) -> str | None:
    """What the token has to do with the one that placed a hold, or None: it is that one, descends from it or has made
    it, at whatever depth; or it descends from what a maker of that one has made after the hold; or both are of one
    identity."""
    placed_by = hold.placed_by_token
    if token_id == placed_by:
        return "has placed this hold"
    releasing, placing = _with_makers(session, token_id), _with_makers(session, placed_by)
    if placed_by in releasing:
        return "was made by the one that has placed this hold"
    if token_id in placing:
        return "has made the one that has placed this hold"
    if _identities(releasing) & _identities(placing):
        return "is of the identity that has placed this hold"
    if _any_made_after(session, [token.id for token in releasing.values() if token.created_by_token in placing], hold):
        return "was made after this hold, by who has made the one that has placed it"
    return None


def _any_made_after(session: Session, token_ids: Sequence[str], hold: Hold) -> bool:
    """By the order of the audit trail: the clock may have gone back in between."""
    if not token_ids:
        return False
    placed, made = aliased(AuditEvent), aliased(AuditEvent)
    later = exists().where(
        placed.checkpoint_id == hold.checkpoint_id,
        placed.action == "hold.place",
        placed.after["hold"].as_string() == hold.id,
        made.id > placed.id,
        made.action == "token.create",
        made.after["token"].as_string().in_(token_ids),
    )
    return bool(session.scalar(select(later)))


def _identities(tokens: dict[str, Token]) -> set[tuple[str | None, str | None]]:
    return {(token.issuer, token.subject) for token in tokens.values() if token.issuer is not None}


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


# Places a hold on a checkpoint that is committed or in the trash. Several people may hold the same one.
#
# The checkpoint's lock decides against trash and purge: who comes second sees what the first did. What is in the trash
# stays there and is not purged.

_HELD_STATES = (CheckpointState.COMMITTED, CheckpointState.TRASHED)


def place_hold(
    context: ServiceContext, caller: Principal, checkpoint_id: str, request: PlaceHold, key: str | None = None
) -> HoldView:
    """The same hold by the same token is the one that is in force. `key`: the client's Idempotency-Key. Raises
    `checkpoint_not_found`, `checkpoint_conflict` for what is not committed, `invalid_request` for a time that is over
    and for a mirror that no store can give, `idempotency_key_reused`, and what asking the store raises.
    """
    if request.mirror:
        _refuse_without_object_lock(context)
    until = _whole_seconds(request.retain_until)
    with context.database.transaction() as session:
        project, run, _ = checkpoint_by_id(session, caller, checkpoint_id)
        checkpoint = locked_checkpoint(session, checkpoint_id)
        now = database_now(session)
        repeat = Repeatable(caller.token_id, key, digest_of("hold", checkpoint_id, request=request))
        earlier = repeat.earlier(session)
        if earlier is not None and (placed := session.get(Hold, earlier)) is not None:
            return hold_view(placed, checkpoint, run, project, now)
        _refuse_unfit(checkpoint)
        if until is not None and until <= now:
            raise ProblemError(
                ProblemCode.INVALID_REQUEST,
                f"{until:%Y-%m-%d %H:%M} UTC is over, and it is {now:%Y-%m-%d %H:%M} now. Name a time to come.",
            )
        wanted = Hold(
            id=f"hd_{secrets.token_hex(6)}",
            checkpoint_id=checkpoint_id,
            kind=HoldKind.LEGAL if until is None else HoldKind.RETAIN_UNTIL,
            reason=request.reason,
            retain_until=until,
            mirror=request.mirror,
            placed_at=now,
            placed_by_token=caller.token_id,
            placed_by=caller.name,
        )
        hold = _same(session, wanted, now)
        if hold is None:
            hold = wanted
            session.add(hold)
            checkpoint.version += 1
            record_event(
                session,
                Actor.person(caller),
                "hold.place",
                project_id=project.id,
                run_id=run.id,
                checkpoint_id=checkpoint_id,
                reason=request.reason,
                after={
                    "hold": hold.id,
                    "kind": hold.kind,
                    "retain_until": None if until is None else until.isoformat(),
                    "mirror": request.mirror,
                },
            )
            session.flush()
        repeat.made(session, hold.id)
        return hold_view(hold, checkpoint, run, project, now)


def _same(session: Session, wanted: Hold, now: datetime) -> Hold | None:
    """A reply may be lost: the client retries the call, which must not leave two holds to release."""
    until = wanted.retain_until
    return session.scalar(
        select(Hold)
        .where(
            Hold.checkpoint_id == wanted.checkpoint_id,
            Hold.placed_by_token == wanted.placed_by_token,
            Hold.reason == wanted.reason,
            Hold.mirror == wanted.mirror,
            Hold.retain_until.is_(None) if until is None else Hold.retain_until == until,
            in_force(now),
        )
        .limit(1)
    )


def _refuse_unfit(checkpoint: Checkpoint) -> None:
    if checkpoint.state in _HELD_STATES:
        return
    what = {
        CheckpointState.UPLOADING: "is still uploading and may never commit. Hold it once it is committed",
        CheckpointState.ABORTED: "was aborted: there is nothing to keep. Hold another step",
    }.get(CheckpointState(checkpoint.state), "is deleted, and its bytes are gone or going. Hold another step")
    raise ProblemError(
        ProblemCode.CHECKPOINT_CONFLICT,
        f"Step {checkpoint.step} {what}.",
        checkpoint_id=checkpoint.id,
        state=checkpoint.state,
    )


def _refuse_without_object_lock(context: ServiceContext) -> None:
    for attached in context.stores:
        if isinstance(attached.store, LockingStore):
            attached.watch.refuse_hanging()
            if attached.store.has_object_lock():
                return
    raise ProblemError(
        ProblemCode.INVALID_REQUEST,
        "No store of this service has Object Lock, so the hold cannot be mirrored. Enable it on the S3 bucket (without "
        "a default retention), or place the hold without `mirror`: the service keeps it all the same.",
    )


def _whole_seconds(moment: datetime | None) -> datetime | None:
    """Rounded up, so that what is shown is what is kept."""
    if moment is None or moment.microsecond == 0:
        return moment
    return moment.replace(microsecond=0) + timedelta(seconds=1)


# Moves the end of a retain-until further away. It never comes nearer.


def extend_hold(context: ServiceContext, caller: Principal, hold_id: str, request: ExtendHold) -> HoldView:
    """The same end again is fine. Raises `hold_not_found` and `invalid_request`."""
    with context.database.transaction() as session:
        hold, checkpoint, run, project = locked_hold(session, caller, hold_id)
        now = database_now(session)
        if not is_in_force(hold, now):
            raise ProblemError(ProblemCode.INVALID_REQUEST, "The hold is over and cannot be extended. Place a new one.")
        if hold.kind != HoldKind.RETAIN_UNTIL or hold.retain_until is None:
            raise ProblemError(
                ProblemCode.INVALID_REQUEST,
                "The hold has no end, and to give it one would shorten it. Let another person release it, or leave it.",
            )
        _refuse_shorter(hold, request)
        if request.retain_until > hold.retain_until:
            record_event(
                session,
                Actor.person(caller),
                "hold.extend",
                project_id=project.id,
                run_id=run.id,
                checkpoint_id=checkpoint.id,
                reason=hold.reason,
                before={"hold": hold.id, "retain_until": hold.retain_until.isoformat()},
                after={"hold": hold.id, "retain_until": request.retain_until.isoformat()},
            )
            hold.retain_until = request.retain_until
            checkpoint.version += 1
            session.flush()
        return hold_view(hold, checkpoint, run, project, now)


def _refuse_shorter(hold: Hold, request: ExtendHold) -> None:
    if hold.retain_until is not None and request.retain_until < hold.retain_until:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"The hold is in force until {hold.retain_until:%Y-%m-%d %H:%M} UTC and is never shortened. Name a later "
            "time, or let another person release it.",
            retain_until=hold.retain_until.isoformat(),
        )


# Releases a hold: never by who placed it, nor by a token of the same line (`why_same_line`), so that one person alone
# cannot take anything away.
#
# The checkpoint is free at once. Where the store's Object Lock mirrors the hold, `controller.py` takes the lock off
# next, and nothing is deleted before that.


def release_hold(context: ServiceContext, caller: Principal, hold_id: str, request: ReleaseHold) -> HoldView:
    """Twice is fine, and the first release stays. Raises `hold_not_found` and `forbidden`."""
    with context.database.transaction() as session:
        hold, checkpoint, run, project = locked_hold(session, caller, hold_id)
        _refuse_same_person(session, caller, hold)
        now = database_now(session)
        if hold.released_at is None:
            hold.released_at, hold.released_by, hold.release_reason = now, caller.name, request.reason
            checkpoint.version += 1
            record_event(
                session,
                Actor.person(caller),
                "hold.release",
                project_id=project.id,
                run_id=run.id,
                checkpoint_id=checkpoint.id,
                reason=request.reason,
                before={"hold": hold.id, "kind": hold.kind, "reason": hold.reason, "placed_by": hold.placed_by},
            )
            session.flush()
        return hold_view(hold, checkpoint, run, project, now)


def _refuse_same_person(session: Session, caller: Principal, hold: Hold) -> None:
    why = why_same_line(session, caller.token_id, hold)
    if why is None:
        return
    raise ProblemError(
        ProblemCode.FORBIDDEN,
        f"The token {caller.name!r} {why}, and only another person's can release it. Ask an administrator whose token "
        f"was there before the hold and has nothing to do with {hold.placed_by!r}, or who runs the database: `holdfast "
        "admin create-token` makes one.",
        hold_id=hold.id,
    )


# The holds that the caller may know of, the newest first.

_CURSOR = "holds"


def list_holds(
    context: ServiceContext,
    caller: Principal,
    *,
    project: str | None = None,
    run: str | None = None,
    checkpoint_id: str | None = None,
    over: bool,
    cursor: str | None,
    limit: int,
) -> Page[HoldView]:
    """`over`: also those that are released or have ended. One may be what keeps a deleted run from its
    purge. Raises what the names raise."""
    if run is not None and project is None:
        raise ProblemError(ProblemCode.INVALID_REQUEST, "A run is named with its project. Give `project` as well.")
    query = with_names().order_by(Hold.placed_at.desc(), Hold.id.desc()).limit(limit + 1)
    if cursor is not None:
        placed_at, hold_id = decode_cursor(_CURSOR, cursor, str, str)
        query = query.where(tuple_(Hold.placed_at, Hold.id) < tuple_(moment_from_text(placed_at), hold_id))
    with context.database.read() as session:
        if checkpoint_id is not None:
            checkpoint_by_id(session, caller, checkpoint_id)
            query = query.where(Hold.checkpoint_id == checkpoint_id)
        if project is not None and run is not None:
            query = query.where(Run.id == run_named(session, caller, project, run, deleted=True)[1].id)
        elif project is not None:
            query = query.where(Project.id == project_named(session, caller, project, deleted=True).id)
        if caller.project_id is not None:
            query = query.where(Project.id == caller.project_id)
        now = database_now(session)
        if not over:
            query = query.where(in_force(now))
        rows, next_cursor = cut_page(
            _CURSOR, session.execute(query).all(), limit, lambda row: (moment_to_text(row[0].placed_at), row[0].id)
        )
    return Page(items=[hold_view(*row, now) for row in rows], next_cursor=next_cursor)

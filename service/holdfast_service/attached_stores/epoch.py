"""The catalog's epoch: what a restore of the database, a rebuild and a clone have to raise (rule fencing-token). A
database that was only moved keeps it.

Afterwards every attempt of the old epoch is fenced, no copy is trusted before it was read again or, if it lies in an
archive, its store was asked, and nothing in a store is changed until an operator claims it after a check: a cloned
staging catalog must never delete production's chunks.
"""

from __future__ import annotations

from contextlib import suppress

from sqlalchemy import select, update

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CopyState, Proof, StoreRole
from holdfast_protocol.stores import ClaimStore, StoreView
from holdfast_protocol.text import without_secrets
from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.attached_stores.ownership import (
    ForeignStoreError,
    Marker,
    misplaced,
    new_claim,
    other_stores,
    read_marker,
    write_marker,
)
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import KEPT
from holdfast_service.db import lease
from holdfast_service.db.dialect import unlimited
from holdfast_service.db.engine import Database
from holdfast_service.db.place import place_of
from holdfast_service.db.tables.core import CatalogIdentity, Checkpoint, Copy
from holdfast_service.db.tables.core import Store as StoreRow
from holdfast_service.db.tables.records import RecordSubject, WrittenRecord
from holdfast_service.errors import ProblemError
from holdfast_service.stores.base import ObjectMissing, StoreError
from holdfast_service.stores.posix.signed_urls import new_signing_key


class NotCheckedError(ProblemError):
    """The store was not compared with the catalog in this epoch, or something was found that claiming would lose."""

    def __init__(self, detail: str) -> None:
        super().__init__(ProblemCode.STORE_FOREIGN, detail)


def raise_epoch(database: Database, actor: Actor, *, accept_loss: bool = False) -> int:
    """The new epoch. A running service of the old one says so in /readyz and must be started again. `accept_loss`: what
    the database was found to have lost is given up with no look at a store, as for a clone that owns none.

    URLs of a posix store are signed with a new key: who has the backup, or the clone, must not sign for this catalog.

    Every record is due again: what is beside the data may be newer than a catalog that was restored, and is outdone
    once the store is claimed.

    A copy that was under way at the backup may have ended since, and its source may be gone: it is read like the others
    before its chunk is called lost. Only what was proven is ever written by a copy.

    The place changes with the epoch or not at all: at the old epoch a clone that is at home would own the original's
    store. All of it is one transaction, which may take minutes in a large catalog.
    """
    place = place_of(database)
    unsynchronized = {"synchronize_session": False}
    with database.transaction() as session, unlimited(session.connection()):
        identity = session.execute(select(CatalogIdentity).with_for_update()).scalar_one()
        identity.place = place
        identity.epoch += 1
        identity.claim = new_claim()
        identity.signing_key, identity.encrypted_with = new_signing_key(), None  # the next start encrypts it
        if accept_loss:
            identity.went_back = None
        session.execute(
            update(Copy).where(Copy.state.in_(KEPT)).values(state=CopyState.SUSPECT, **lease.ended()),
            execution_options=unsynchronized,
        )
        session.execute(
            update(Copy)
            .where(Copy.state == CopyState.COPYING)
            .values(state=CopyState.SUSPECT, proof=Proof.READ, **lease.ended()),
            execution_options=unsynchronized,
        )
        for table in (Checkpoint, RecordSubject):
            session.execute(
                update(table).where(table.recorded_version > 0).values(recorded_version=0),
                execution_options=unsynchronized,
            )
        session.execute(
            update(WrittenRecord).values(version=0, **lease.ended()),
            execution_options=unsynchronized,
        )
        record_event(session, actor, "catalog.new_epoch", after={"epoch": identity.epoch})
        return identity.epoch


def confirm_move(database: Database, actor: Actor) -> None:
    """The database was moved here and the old one is gone: the catalog goes on in its epoch."""
    place = place_of(database)
    with database.transaction() as session:
        identity = session.execute(select(CatalogIdentity).with_for_update()).scalar_one()
        before, identity.place = identity.place, place
        record_event(session, actor, "catalog.confirm_move", before={"place": before}, after={"place": place})


def claim_store(context: ServiceContext, attached: AttachedStore, actor: Actor, *, accept_loss: bool = False) -> Marker:
    """Tells the store that it is this catalog's in this epoch; from then on the service changes it again.

    Each claim of another database is in a higher epoch than the one before: by that its records outdo what lies beside
    the data. Repeatable. Raises StoreError, and NotCheckedError without a check in this epoch, for a store that was
    claimed since by another database or stands in another one's place, or if the check found what claiming would lose
    and no operator has accepted that.
    """
    _refuse_anothers(context, attached)
    with context.database.transaction() as session:
        identity = session.execute(select(CatalogIdentity)).scalar_one()
        went_back = identity.went_back
        row = session.execute(select(StoreRow).where(StoreRow.id == attached.store_id)).scalar_one()
        if (identity.epoch, identity.claim) != (context.epoch, context.claim):
            raise NotCheckedError(f"The catalog is at epoch {identity.epoch}. Start the service again.")
        if row.checked_epoch != identity.epoch:
            raise NotCheckedError(
                f"The {attached.role} store was not compared with the catalog in epoch {identity.epoch}. Run "
                "`holdfast catalog check` first."
            )
        if identity.went_back is not None:
            _refuse_what_was_lost(identity, accept_loss=accept_loss)
            if attached.role is StoreRole.PRIMARY:
                identity.went_back = None
        if not row.checked_whole and not accept_loss:
            raise NotCheckedError(
                f"The check of {row.checked_at:%Y-%m-%d %H:%M} UTC found in the {attached.role} store what claiming "
                "would lose. Look at what `holdfast catalog check` says, and fix it or claim with --accept-loss."
            )
        record_event(
            session,
            actor,
            "store.claim",
            before={"went_back": went_back} if went_back else None,
            after={"store": attached.role, "epoch": identity.epoch, "whole": row.checked_whole},
        )
    marker = Marker(context.catalog_id, context.epoch, attached.store_id, context.claim)
    with attached.watch.ownership.opened():
        write_marker(attached.store, marker)
    return marker


def _refuse_anothers(context: ServiceContext, attached: AttachedStore) -> None:
    """A marker that is missing, cannot be read or is another catalog's is what a claim may replace. Not that of another
    database, nor of another store of this one."""
    with suppress(ObjectMissing, ForeignStoreError):
        marker = read_marker(attached.store)
        if marker.catalog_id == context.catalog_id and marker.outdoes(context.epoch, context.claim):
            raise NotCheckedError(
                f"Another database of this catalog has claimed the {attached.role} store in epoch {marker.epoch}, and "
                f"this one is at {context.epoch}. Stop the service, run `holdfast admin raise-epoch`, start it, and "
                "check again."
            )
        with context.database.read() as session:
            others = other_stores(session, attached.store_id)
        if marker.is_of(others, context.catalog_id, context.epoch, context.claim):
            # The check may be from before it came to stand there. Two stores with one number would be one copy.
            raise NotCheckedError(misplaced(marker))


def _refuse_what_was_lost(identity: CatalogIdentity, *, accept_loss: bool) -> None:
    if identity.went_back_epoch == identity.epoch:
        raise NotCheckedError(
            "The database went back to an older state in this epoch: what it says of copies may be wrong, and jobs of "
            "before may be alive. Stop the service, run `holdfast admin raise-epoch`, start it, and check again."
        )
    if not accept_loss:
        raise NotCheckedError(
            f"The database went back to an older state and has lost: {identity.went_back}. `holdfast catalog check` "
            "names what is left of it beside the data. Rebuild the catalog from there, or claim with --accept-loss."
        )


def list_stores(context: ServiceContext) -> list[StoreView]:
    return [_view(context, attached) for attached in context.stores]


def claim(context: ServiceContext, caller: Principal, role: StoreRole, request: ClaimStore) -> StoreView:
    """Repeatable. Raises `invalid_request` for a store that is not attached, and `store_foreign` without a
    check in this epoch that allows it."""
    attached = attached_with(context, role)
    claim_store(context, attached, Actor.person(caller), accept_loss=request.accept_loss)
    return _view(context, attached)


def attached_with(context: ServiceContext, role: StoreRole) -> AttachedStore:
    attached = context.attached(role)
    if attached is None:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"No {role} store is attached to this service. `holdfast stores list` shows those that are.",
            store=role.value,
        )
    return attached


def _view(context: ServiceContext, attached: AttachedStore) -> StoreView:
    with context.database.read() as session:
        row = session.execute(select(StoreRow).where(StoreRow.id == attached.store_id)).scalar_one()
    try:
        problem = attached.watch.ownership.problem()
    except StoreError as error:
        problem = str(error)
    enforced = attached.store.capabilities
    return StoreView(
        role=attached.role,
        kind=row.kind,
        url=without_secrets(row.url),
        claimed=problem is None,
        problem=problem,
        checked_at=row.checked_at,
        checked_epoch=row.checked_epoch,
        checked_whole=row.checked_whole,
        probed_at=None if enforced is None else enforced.probed_at,
        changed_at=None if enforced is None else enforced.changed_at,
        weaknesses=[] if enforced is None else enforced.weaknesses,
    )

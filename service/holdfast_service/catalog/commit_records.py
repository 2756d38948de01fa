"""Where the commit record of a checkpoint lies beside its data, and how it is taken away (protocol rule 30).

The record is written after the commit and after every change of state, health, pin or hold, and removed before any
chunk: so a catalog that is rebuilt from the bucket neither loses a commit nor raises the dead.
"""

from __future__ import annotations

from holdfast_service.context import ServiceContext
from holdfast_service.stores.base import validated_project_id

FOLDER = "manifests"


def record_name(project_id: str, checkpoint_id: str) -> str:
    """The name of the small object, in every store that holds a record of the checkpoint."""
    return f"{validated_project_id(project_id)}/{FOLDER}/{checkpoint_id}.json"


def remove_record(context: ServiceContext, project_id: str, checkpoint_id: str) -> None:
    """From every attached store. Repeatable. Raises StoreError: then the checkpoint's chunks must stay."""
    for attached in context.stores:
        attached.store.delete_named(record_name(project_id, checkpoint_id))

import { type ReactNode, useState } from "react";
import type { Schemas } from "@/api/client";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { changesOf } from "@/format/changes";
import { findCheckpoint } from "../selector";
import { useChanged } from "./changes";

type CheckpointView = Schemas["CheckpointView"];

/** What an edit can change, and another person's may have changed meanwhile. */
const EDITED = [
  "state",
  "labels",
  "health",
  "health_reason",
  "metrics",
  "pinned_at",
  "pinned_by",
  "pin_reason",
  "pinned_until",
] as const;

interface EditDialogProps {
  title: string;
  action: string;
  checkpoint: CheckpointView;
  /** Writes onto this version. */
  onEdit: (seen: CheckpointView) => Promise<unknown>;
  onClose: () => void;
  children: ReactNode;
}

/** Edits the version that was there when the dialog was opened: what a poll brings while somebody types is one that
 * this person has not looked at. If somebody else was faster, it says what has changed. */
export function EditDialog({ checkpoint, onEdit, ...dialog }: EditDialogProps) {
  const [seen, setSeen] = useState(checkpoint);
  const changed = useChanged();

  async function edit() {
    await onEdit(seen);
    await changed();
  }

  async function conflict() {
    const now = await findCheckpoint({ id: seen.id });
    return { changes: changesOf(editedOf(seen), editedOf(now), { lists: true }), reload: () => setSeen(now) };
  }

  return <ConfirmDialog {...dialog} onConfirm={edit} onConflict={conflict} />;
}

function editedOf(checkpoint: CheckpointView): Record<string, unknown> {
  return Object.fromEntries(EDITED.map((name) => [name, checkpoint[name] ?? null]));
}

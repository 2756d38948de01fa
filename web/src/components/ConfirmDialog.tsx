import { type FormEvent, type ReactNode, useId, useState } from "react";
import { isEditConflict } from "@/api/problem";
import type { Change } from "@/format/changes";
import styles from "./ConfirmDialog.module.css";
import { Dialog } from "./dialog/Dialog";
import { Changes } from "./facts/Changes";
import { ErrorState } from "./states";

/** Somebody else was faster than what this dialog would write. */
export interface Conflict {
  /** What that person has changed since it was read. */
  changes: readonly Change[];
  /** Goes on from the version that is there now. */
  reload: () => void;
}

interface ConfirmDialogProps {
  title: string;
  /** What will happen. */
  children: ReactNode;
  /** What the button says: the verb. */
  action: string;
  /** Must be typed before the button works, for example the count of checkpoints that expire. */
  typed?: string;
  /** A rejection is shown in the dialog, which stays open. */
  onConfirm: () => Promise<unknown>;
  /** After a refusal because the version that was seen is not the newest (412, 428): reads what has changed. */
  onConflict?: () => Promise<Conflict>;
  /** Called after the action, and on Cancel and Escape. */
  onClose: () => void;
}

/** Asks before something is done that cannot be taken back at once. Rendered while it is open. */
export function ConfirmDialog(props: ConfirmDialogProps) {
  const { title, children, action, typed, onConfirm, onConflict, onClose } = props;
  const [text, setText] = useState("");
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<unknown>(null);
  const [conflict, setConflict] = useState<Conflict | null>(null);
  const id = useId();
  const ready = !busy && conflict === null && (typed === undefined || asRead(text) === asRead(typed));

  async function confirm(event: FormEvent) {
    event.preventDefault();
    if (!ready) return;
    setBusy(true);
    setError(null);
    try {
      await onConfirm();
      onClose();
    } catch (failure) {
      setError(failure);
      if (onConflict && isEditConflict(failure)) await onConflict().then(setConflict, setError);
      setBusy(false);
    }
  }

  function reload() {
    conflict?.reload();
    setConflict(null);
    setError(null);
  }

  return (
    <Dialog title={title} onClose={onClose} keeps={busy}>
      <form onSubmit={confirm}>
        {children}
        {typed !== undefined && (
          <p>
            <label htmlFor={`${id}-typed`}>
              Type <strong>{typed}</strong> to go on
            </label>
            <br />
            <input
              id={`${id}-typed`}
              // The dialog opens with the focus on what has this attribute. React's own property would come too early.
              ref={(field) => field?.setAttribute("autofocus", "")}
              autoComplete="off"
              value={text}
              onChange={(event) => setText(event.target.value)}
            />
          </p>
        )}
        {error !== null && <ErrorState error={error} />}
        {conflict !== null && <Changed conflict={conflict} onReload={reload} />}
        <p className={styles.buttons}>
          <button type="button" onClick={onClose} disabled={busy}>
            Cancel
          </button>
          <button type="submit" className="primary" disabled={!ready}>
            {action}
          </button>
        </p>
      </form>
    </Dialog>
  );
}

/** The browser shows no space at an end, and of several spaces one: nobody can type what is not shown. */
function asRead(text: string): string {
  return text.trim().replaceAll(/\s+/g, " ");
}

function Changed({ conflict, onReload }: { conflict: Conflict; onReload: () => void }) {
  return (
    <div role="status">
      {conflict.changes.length === 0 ? (
        <p>What this dialog shows of it is the same as before.</p>
      ) : (
        <>
          <p>Changed since it was opened:</p>
          <Changes of={conflict.changes} />
        </>
      )}
      <button type="button" onClick={onReload}>
        Reload, and go on from there
      </button>
    </div>
  );
}

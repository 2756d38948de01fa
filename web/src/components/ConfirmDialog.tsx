import { type FormEvent, type ReactNode, useId, useLayoutEffect, useRef, useState } from "react";
import styles from "./ConfirmDialog.module.css";
import { ErrorState } from "./states";

interface ConfirmDialogProps {
  title: string;
  /** What will happen. */
  children: ReactNode;
  /** What the button says: the verb. */
  action: string;
  /** Must be typed before the button works, for example the count of checkpoints that go. */
  typed?: string;
  /** A rejection is shown in the dialog, which stays open. */
  onConfirm: () => Promise<unknown>;
  /** Called after the action, and on Cancel and Escape. */
  onClose: () => void;
}

/** Asks before something is done that cannot be taken back at once. Rendered while it is open. */
export function ConfirmDialog({ title, children, action, typed, onConfirm, onClose }: ConfirmDialogProps) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [text, setText] = useState("");
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<unknown>(null);
  const id = useId();
  const ready = !busy && (typed === undefined || text.trim() === typed);

  // The browser's own dialog keeps the focus inside, makes the rest inert and gives the focus back,
  // if it is closed before React takes it out: an effect after the layout would come too late.
  useLayoutEffect(() => {
    const shown = dialog.current;
    shown?.showModal();
    return () => shown?.close();
  }, []);

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
      setBusy(false);
    }
  }

  return (
    <dialog
      ref={dialog}
      className={styles.dialog}
      aria-labelledby={`${id}-title`}
      onCancel={(event) => {
        event.preventDefault();
        if (!busy) onClose();
      }}
    >
      <form onSubmit={confirm}>
        <h2 id={`${id}-title`}>{title}</h2>
        {children}
        {typed !== undefined && (
          <p>
            <label htmlFor={`${id}-typed`}>
              Type <strong>{typed}</strong> to go on
            </label>
            <br />
            <input
              id={`${id}-typed`}
              autoComplete="off"
              value={text}
              onChange={(event) => setText(event.target.value)}
            />
          </p>
        )}
        {error !== null && <ErrorState error={error} />}
        <p className={styles.buttons}>
          <button type="button" onClick={onClose} disabled={busy}>
            Cancel
          </button>
          <button type="submit" className="primary" disabled={!ready}>
            {action}
          </button>
        </p>
      </form>
    </dialog>
  );
}

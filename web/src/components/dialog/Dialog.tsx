import { type ReactNode, useEffect, useId, useLayoutEffect, useRef, useState } from "react";
import styles from "../ConfirmDialog.module.css";
import { HintPlace } from "../Hint";

interface DialogProps {
  title: string;
  children: ReactNode;
  /** On Escape, and on what else the browser closes a dialog by. */
  onClose: () => void;
  /** Nothing but what stands in it closes it. */
  keeps?: boolean;
  /** For more than a few words. */
  wide?: boolean;
}

/** Those that are open, the uppermost last: a key is for that one alone. */
const open: HTMLDialogElement[] = [];

/** The browser's own dialog: it keeps the focus inside, makes the rest inert and gives the focus back. Rendered while it
 * is open. */
export function Dialog({ title, children, onClose, keeps = false, wide = false }: DialogProps) {
  const [dialog, setDialog] = useState<HTMLDialogElement | null>(null);
  const isOut = useRef(false);
  const id = useId();

  // Closed before React takes it out: an effect after the layout would come too late to give the focus back.
  useLayoutEffect(() => {
    if (dialog === null) return;
    isOut.current = false;
    dialog.showModal();
    open.push(dialog);
    return () => {
      isOut.current = true;
      dialog.close();
      open.splice(open.indexOf(dialog), 1);
    };
  }, [dialog]);

  // Browsers let a page refuse Escape once: the second one closes, with no `cancel`. One that no key event had told of is
  // the page's own. It is the document's, for a busy dialog may have no element that has the focus.
  useEffect(() => {
    function onKeyDown(event: KeyboardEvent) {
      if (event.key !== "Escape" || event.defaultPrevented || open.at(-1) !== dialog) return;
      event.preventDefault();
      if (!keeps) onClose();
    }
    document.addEventListener("keydown", onKeyDown);
    return () => document.removeEventListener("keydown", onKeyDown);
  }, [dialog, keeps, onClose]);

  return (
    <dialog
      ref={setDialog}
      className={wide ? `${styles.dialog} ${styles.wide}` : styles.dialog}
      aria-labelledby={id}
      onCancel={(event) => {
        event.preventDefault();
        if (!keeps) onClose();
      }}
      onClose={() => {
        // The Back gesture of a phone asks nobody.
        if (dialog === null || dialog.open || isOut.current) return;
        if (keeps) dialog.showModal();
        else onClose();
      }}
    >
      <HintPlace value={dialog}>
        <h2 id={id}>{title}</h2>
        {children}
      </HintPlace>
    </dialog>
  );
}

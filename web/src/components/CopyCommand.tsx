import { useState } from "react";
import styles from "./CopyCommand.module.css";

/** A command to paste into a shell, with a button that copies it. */
export function CopyCommand({ command, label }: { command: string; label: string }) {
  const [said, setSaid] = useState("");

  async function copy() {
    try {
      await navigator.clipboard.writeText(command);
      setSaid("Copied");
    } catch {
      // Over plain HTTP a browser gives no clipboard.
      setSaid("This browser lets no page copy here: select the text");
    }
  }

  return (
    <div className={styles.command}>
      <code>{command}</code>
      <button type="button" onClick={copy} aria-label={`Copy: ${label}`}>
        Copy
      </button>
      <span role="status" className="quiet">
        {said}
      </span>
    </div>
  );
}

import type { ReactNode } from "react";
import styles from "./Figures.module.css";

/** Facts in a few words each, side by side. `panel`: on a surface of their own. */
export function Figures({ panel = false, children }: { panel?: boolean; children: ReactNode }) {
  return <dl className={panel ? `panel ${styles.figures}` : styles.figures}>{children}</dl>;
}

export function Figure({ name, children }: { name: string; children: ReactNode }) {
  return (
    <div>
      <dt className="quiet">{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

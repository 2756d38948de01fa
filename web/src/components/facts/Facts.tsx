import type { ReactNode } from "react";
import styles from "./Facts.module.css";

/** Names and values, side by side where there is room. */
export function Facts({ children }: { children: ReactNode }) {
  return <dl className={`panel ${styles.facts}`}>{children}</dl>;
}

export function Fact({ name, wide = false, children }: { name: string; wide?: boolean; children: ReactNode }) {
  return (
    <div className={wide ? styles.wide : undefined}>
      <dt className="quiet">{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

/** A part of a screen under a heading, by which a screen reader finds it. `aside`: controls beside the heading. */
export function Section(props: { id: string; title: string; aside?: ReactNode; children: ReactNode }) {
  const { id, title, aside, children } = props;
  return (
    <section aria-labelledby={id}>
      <div className={styles.heading}>
        <h2 id={id}>{title}</h2>
        {aside}
      </div>
      {children}
    </section>
  );
}

import { type ReactNode, useEffect, useRef } from "react";
import styles from "./Screen.module.css";

interface ScreenProps {
  title: string;
  /** The way here: links to the screens above, the highest first. */
  above?: ReactNode[];
  /** Controls beside the title. */
  controls?: ReactNode;
  children: ReactNode;
}

let isFirst = true;

/** What every screen stands in: its title in the page and the tab, the breadcrumbs, and the focus, which goes to the
 * title when the screen changes, so that a screen reader tells where the reader is. */
export function Screen({ title, above = [], controls, children }: ScreenProps) {
  const heading = useRef<HTMLHeadingElement>(null);

  useEffect(() => {
    document.title = `${title} · Holdfast`;
    // The first screen is read from the top by itself.
    if (!isFirst) heading.current?.focus({ preventScroll: true });
    isFirst = false;
  }, [title]);

  return (
    <>
      {above.length > 0 && (
        <nav aria-label="Breadcrumbs">
          <ol className={styles.crumbs}>
            {above.map((crumb, index) => (
              // biome-ignore lint/suspicious/noArrayIndexKey: a crumb is its place.
              <li key={index}>{crumb}</li>
            ))}
          </ol>
        </nav>
      )}
      <div className={styles.title}>
        <h1 ref={heading} tabIndex={-1}>
          {title}
        </h1>
        {controls}
      </div>
      {children}
    </>
  );
}

import { type Change, inWords } from "@/format/changes";
import styles from "./Changes.module.css";

/** What became of which field: the value before, and the one after. */
export function Changes({ of }: { of: readonly Change[] }) {
  return (
    <ul className={styles.changes}>
      {of.map(({ path, before, after }) => (
        <li key={path}>
          {path.replaceAll("_", " ")}: <del>{inWords(before)}</del> <span aria-hidden="true">→</span>
          <span className="visually-hidden"> became </span> <ins>{inWords(after)}</ins>
        </li>
      ))}
    </ul>
  );
}

import { formatValue } from "./changes";
import styles from "./Operations.module.css";

/** Fields with their values: of a report, of arguments or of a result. */
export function Fields({ label, of }: { label: string; of: Record<string, unknown> }) {
  const names = Object.keys(of);
  return (
    <section className={styles.changes}>
      <h3>{label}</h3>
      {names.length === 0 ? (
        <p className="quiet">Nothing.</p>
      ) : (
        <table>
          <tbody>
            {names.map((name) => (
              <tr key={name}>
                <th scope="row">{name.replaceAll("_", " ")}</th>
                <td>{formatValue(of[name])}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </section>
  );
}

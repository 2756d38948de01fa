import { useQuery as useCall } from "@tanstack/react-query";
import { useNavigate, useSearch } from "@tanstack/react-router";
import { useQuery } from "@/api/client";
import { configQuery } from "@/api/config";
import { ProblemError } from "@/api/problem";
import { EmptyState, Reply } from "@/components/states";
import { Nothing } from "@/components/values";
import { asText, type Change, changesOf } from "@/format/changes";
import { formatCount } from "@/format/numbers";
import styles from "./RunScreen.module.css";

interface CompareProps {
  project: string;
  run: string;
  latest: number;
}

/** What two attempts were told to train, and on what they ran. Without a choice: the newest and the one before. */
export function CompareAttempts({ project, run, latest }: CompareProps) {
  const search = useSearch({ from: "/runs/$run" });
  const navigate = useNavigate({ from: "/runs/$run" });
  const after = search.after ?? latest;
  const before = search.before ?? Math.max(1, after - 1);
  if (latest === 0) {
    return (
      <section aria-labelledby="differences">
        <h2 id="differences">Differences between attempts</h2>
        <EmptyState title="No attempt yet">
          <p>An attempt begins when the training script opens the checkpointer.</p>
        </EmptyState>
      </section>
    );
  }
  // Unless one is chosen, the service takes the newest one before that gave a configuration.
  const config = <Configuration project={project} run={run} against={search.before} after={after} />;
  return (
    <section aria-labelledby="differences">
      <h2 id="differences">Differences between attempts</h2>
      {latest < 2 ? (
        <>
          <EmptyState title="There is one attempt">
            <p>Its differences are shown when the job was started again.</p>
          </EmptyState>
          {config}
        </>
      ) : (
        <>
          <form
            className="row"
            key={`${before} ${after}`}
            onSubmit={(event) => {
              event.preventDefault();
              const given = new FormData(event.currentTarget);
              const chosen = { before: Number(given.get("before")), after: Number(given.get("after")) };
              void navigate({ search: (old) => ({ ...old, ...chosen }), resetScroll: false });
            }}
          >
            <label>
              Attempt <input name="before" type="number" required min={1} max={latest} defaultValue={before} />
            </label>
            <label>
              with attempt <input name="after" type="number" required min={1} max={latest} defaultValue={after} />
            </label>
            <button type="submit">Compare</button>
            <span className="quiet">of {formatCount(latest)}</span>
          </form>
          {config}
          <EnvironmentDifferences project={project} run={run} before={before} after={after} />
        </>
      )}
    </section>
  );
}

interface Pair {
  project: string;
  run: string;
  before: number;
  after: number;
}

interface ConfigurationProps {
  project: string;
  run: string;
  /** undefined: the newest one before that gave a configuration. */
  against: number | undefined;
  after: number;
}

function Configuration({ project, run, against, after }: ConfigurationProps) {
  const found = useCall(configQuery(project, run, after, against));
  // A service before this call: the page can come from a newer one while several are being updated.
  const isUnknown = found.error instanceof ProblemError && found.error.problem.code === "route_not_found";
  return (
    <>
      <h3>Configuration</h3>
      {isUnknown ? (
        <p className="quiet">This service keeps no configurations. Update it.</p>
      ) : (
        <Reply of={found} what="the configuration">
          {({ config, compared_with: before, differences, differences_left_out: leftOut }) =>
            config === null ? (
              <p className="quiet">
                Attempt {after} gave no configuration. Give it with <code>Checkpointer(config=…)</code>.
              </p>
            ) : (
              <>
                {before === null ? (
                  <p className="quiet">No earlier attempt gave a configuration to compare it with.</p>
                ) : (
                  <Differences
                    what="Configuration"
                    none={`It is that of attempt ${before}, or attempt ${before} gave none.`}
                    found={differences}
                    {...{ before, after, leftOut }}
                  />
                )}
                <details>
                  <summary>The whole configuration of attempt {after}</summary>
                  {/* biome-ignore lint/a11y/noNoninteractiveTabindex: the keyboard scrolls it. */}
                  <pre className={styles.scroll} tabIndex={0}>
                    {JSON.stringify(config, null, 2)}
                  </pre>
                </details>
              </>
            )
          }
        </Reply>
      )}
    </>
  );
}

function EnvironmentDifferences({ project, run, before, after }: Pair) {
  const of = (number: number) => ({ params: { path: { project, run, number } } });
  const path = "/v1/projects/{project}/runs/{run}/attempts/{number}";
  const earlier = useQuery("get", path, of(before));
  const later = useQuery("get", path, of(after));
  return (
    <>
      <h3>Environment</h3>
      <Reply of={earlier} what={`attempt ${before}`}>
        {(one) => (
          <Reply of={later} what={`attempt ${after}`}>
            {(other) => (
              <Differences
                what="Environment"
                none="Both ran in the same environment."
                found={changesOf(
                  { host: one.host, world_size: String(one.world_size), ...one.environment },
                  { host: other.host, world_size: String(other.world_size), ...other.environment },
                )}
                {...{ before, after, leftOut: 0 }}
              />
            )}
          </Reply>
        )}
      </Reply>
    </>
  );
}

/** `change`: as the service says it of a configuration: added, removed or changed. */
type Difference = Partial<Change> & { path: string; change?: string };

interface DifferencesProps {
  what: string;
  none: string;
  found: readonly Difference[];
  before: number;
  after: number;
  leftOut: number;
}

function Differences({ what, none, found, before, after, leftOut }: DifferencesProps) {
  if (found.length === 0) return <p className="quiet">{none}</p>;
  return (
    <div className={styles.scroll}>
      <table className={styles.table}>
        <caption className="visually-hidden">{what} that differs</caption>
        <thead>
          <tr>
            <th scope="col">{what}</th>
            <th scope="col">Attempt {before}</th>
            <th scope="col">Attempt {after}</th>
          </tr>
        </thead>
        <tbody>
          {found.map((each) => (
            <tr key={each.path}>
              <th scope="row">
                <code>{each.path}</code>
              </th>
              <td>
                <Value value={each.before} isThere={each.change !== "added" && each.before !== undefined} />
              </td>
              <td>
                <Value value={each.after} isThere={each.change !== "removed" && each.after !== undefined} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      {leftOut > 0 && <p className="quiet">{formatCount(leftOut)} more are not shown.</p>}
    </div>
  );
}

function Value({ value, isThere }: { value: unknown; isThere: boolean }) {
  return isThere ? <code>{asText(value)}</code> : <Nothing />;
}

import { useQuery as useFound } from "@tanstack/react-query";
import { Link, useNavigate, useParams, useSearch } from "@tanstack/react-router";
import { type FormEvent, type ReactNode, useState } from "react";
import { type Schemas, useQuery } from "@/api/client";
import { configQuery } from "@/api/config";
import { Screen } from "@/app/Screen";
import { CheckpointName } from "@/components/facts/CheckpointName";
import { Section } from "@/components/facts/Facts";
import { EmptyState, ErrorState, Loading, Reply } from "@/components/states";
import { Bytes, Nothing, Time } from "@/components/values";
import { type Change, changesOf } from "@/format/changes";
import { formatBytes, formatCount } from "@/format/numbers";
import { useRestorePoint } from "@/run/replies";
import { RunName } from "@/runs/RunName";
import styles from "../checkpoint.module.css";
import { ById } from "../Lineage";
import { formatMetric, numberOf } from "../metric";
import { findCheckpoint, nameOf, readTarget } from "../selector";
import { namesOf } from "./compare";
import { SameBytes } from "./SameBytes";
import { Values } from "./Values";

type CheckpointView = Schemas["CheckpointView"];

/** Two checkpoints side by side: what is another value, and which bytes are the same. */
export function CompareScreen() {
  const { id } = useParams({ from: "/checkpoints/$id/compare" });
  const { with: other } = useSearch({ from: "/checkpoints/$id/compare" });
  const one = useQuery("get", "/v1/checkpoints/{checkpoint_id}", { params: { path: { checkpoint_id: id } } });
  const two = useQuery(
    "get",
    "/v1/checkpoints/{checkpoint_id}",
    { params: { path: { checkpoint_id: other ?? "" } } },
    { enabled: other !== undefined },
  );
  const above = [
    <Link key="all" to="/checkpoints">
      Checkpoints
    </Link>,
  ];
  if (one.data !== undefined) {
    above.push(<RunName key="run" project={one.data.project} run={one.data.run} />);
    above.push(
      <CheckpointName key="one" id={id}>
        {nameOf(one.data)}
      </CheckpointName>,
    );
  }
  return (
    <Screen title={one.data === undefined ? "Compare" : `Compare ${nameOf(one.data)}`} above={above}>
      <Reply of={one} what={id}>
        {(first) => (
          <>
            <Choose checkpoint={first} />
            {other !== undefined && (
              <Reply of={two} what={other}>
                {(second) => <Compared one={first} other={second} key={`${id} ${other}`} />}
              </Reply>
            )}
          </>
        )}
      </Reply>
    </Screen>
  );
}

/** Which checkpoint to compare with. */
function Choose({ checkpoint }: { checkpoint: CheckpointView }) {
  const { with: chosen } = useSearch({ from: "/checkpoints/$id/compare" });
  const navigate = useNavigate({ from: "/checkpoints/$id/compare" });
  const [text, setText] = useState("");
  const [error, setError] = useState<unknown>(null);
  const { project, run, attempt, step } = checkpoint;
  const path = { project, run };
  const before = useQuery(
    "get",
    "/v1/projects/{project}/runs/{run}/checkpoints",
    { params: { path, query: { max_step: step - 1, limit: 1, state: ["committed"] } } },
    { enabled: step > 0 },
  );
  const own = useQuery("get", "/v1/projects/{project}/runs/{run}/attempts/{number}", {
    params: { path: { ...path, number: attempt } },
  });
  const point = useRestorePoint(project, run);

  async function open(event: FormEvent) {
    event.preventDefault();
    setError(null);
    try {
      const found = await findCheckpoint(readTarget(text, path));
      setText("");
      void navigate({ search: (old) => ({ ...old, with: found.id }) });
    } catch (failure) {
      setError(failure);
    }
  }

  const offered: [string, string | null | undefined][] = [
    ["the one before it", before.data?.items[0]?.id],
    ["the one that its attempt went on from", own.data?.resumed_from],
    ["the restore point", point.data?.restore_point?.checkpoint_id],
  ];
  const known = offered.filter(([, id]) => id != null && id !== checkpoint.id && id !== chosen);
  return (
    <>
      <form className="row" onSubmit={(event) => void open(event)}>
        <label htmlFor="other">{chosen === undefined ? "Compare with" : "Compare with another"}</label>
        <input
          id="other"
          className={styles.finder}
          value={text}
          onChange={(event) => setText(event.target.value)}
          placeholder="best:loss, 1200, 1200#3 or project/run@latest"
          autoComplete="off"
          spellCheck={false}
          required
        />
        <button type="submit" className="primary">
          Compare
        </button>
      </form>
      {error !== null && <ErrorState error={error} />}
      {known.length > 0 && (
        <p className="quiet">
          Or with{" "}
          {known.map(([words, id], index) => (
            <span key={words}>
              {index > 0 && ", "}
              <Link from="/checkpoints/$id/compare" to="." search={(old) => ({ ...old, with: id ?? undefined })}>
                {words}
              </Link>
            </span>
          ))}
          .
        </p>
      )}
    </>
  );
}

function Compared({ one, other }: { one: CheckpointView; other: CheckpointView }) {
  if (one.id === other.id) return <EmptyState title="These are the same checkpoint" />;
  return (
    <>
      <What one={one} other={other} />
      <Metrics one={one} other={other} />
      <Components one={one} other={other} />
      <Configs one={one} other={other} />
      <SameBytes one={one} other={other} />
      <Values one={one} other={other} />
    </>
  );
}

interface Pair {
  one: CheckpointView;
  other: CheckpointView;
}

function Two(props: {
  label: string;
  one: CheckpointView;
  other: CheckpointView;
  delta?: boolean;
  children: ReactNode;
}) {
  const { label, one, other, delta = false, children } = props;
  return (
    <div className={styles.wideTable}>
      <table className={styles.table} aria-label={label}>
        <thead>
          <tr>
            <td />
            <th scope="col">
              <CheckpointName id={one.id}>{nameOf(one)}</CheckpointName>
            </th>
            <th scope="col">
              <CheckpointName id={other.id}>{nameOf(other)}</CheckpointName>
            </th>
            {delta && <th scope="col">Difference</th>}
          </tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}

/** The word stands beside the colour, so that nobody needs the colour. */
function Line(props: { name: string; one: ReactNode; other: ReactNode; differs: boolean; delta?: ReactNode }) {
  const { name, one, other, differs, delta } = props;
  return (
    <tr className={differs ? styles.differs : undefined}>
      <th scope="row">
        {name}
        {differs && (
          <>
            <span aria-hidden="true"> ≠</span>
            <span className="visually-hidden"> differs</span>
          </>
        )}
      </th>
      <td>{one}</td>
      <td>{other}</td>
      {delta !== undefined && <td>{delta}</td>}
    </tr>
  );
}

function What({ one, other }: Pair) {
  const rows: [string, (of: CheckpointView) => unknown, (of: CheckpointView) => ReactNode][] = [
    ["Run", (of) => `${of.project}/${of.run}`, (of) => `${of.project}/${of.run}`],
    ["Step", (of) => of.step, (of) => formatCount(of.step)],
    ["Attempt", (of) => of.attempt, (of) => of.attempt],
    ["Kind", (of) => of.kind, (of) => of.kind],
    ["State", (of) => of.state, (of) => of.state],
    ["Health", (of) => of.health, (of) => `${of.health}${of.health_reason ? `: ${of.health_reason}` : ""}`],
    ["Tier", (of) => of.tier, (of) => of.tier],
    ["World size", (of) => of.world_size, (of) => formatCount(of.world_size)],
    ["Committed", (of) => of.committed_at, (of) => <Time at={of.committed_at} />],
    ["State in the trainer", (of) => of.logical_bytes, (of) => <Bytes count={of.logical_bytes} />],
    ["Its chunks", (of) => of.chunk_bytes, (of) => <Bytes count={of.chunk_bytes} />],
    ["Sent", (of) => of.uploaded_bytes, (of) => <Bytes count={of.uploaded_bytes} />],
    [
      "Blocked training",
      (of) => of.blocked_seconds,
      (of) => (of.blocked_seconds == null ? <Nothing why="unknown" /> : `${of.blocked_seconds.toFixed(2)} s`),
    ],
    ["Labels", (of) => of.labels.join(), (of) => of.labels.join(", ") || <Nothing />],
    ["Pinned", (of) => of.pinned_at != null, (of) => of.pin_reason ?? <Nothing />],
    [
      "Digest",
      (of) => of.digest,
      (of) => (of.digest === null ? <Nothing /> : <code className={styles.digest}>{of.digest}</code>),
    ],
  ];
  return (
    <Section id="what" title="What they are">
      <Two label="What they are" one={one} other={other}>
        {rows.map(([name, value, show]) => (
          <Line key={name} name={name} one={show(one)} other={show(other)} differs={value(one) !== value(other)} />
        ))}
      </Two>
    </Section>
  );
}

function Metrics({ one, other }: Pair) {
  const names = namesOf(one.metrics, other.metrics);
  return (
    <Section id="metrics" title="Metrics">
      {names.length === 0 ? (
        <EmptyState title="Neither has metrics" />
      ) : (
        <Two label="Metrics" one={one} other={other} delta>
          {names.map((name) => {
            const [first, second] = [one.metrics[name], other.metrics[name]];
            const [before, after] = [numberOf(first), numberOf(second)];
            return (
              <Line
                key={name}
                name={name}
                one={first === undefined ? <Nothing /> : formatMetric(first)}
                other={second === undefined ? <Nothing /> : formatMetric(second)}
                differs={formatMetric(first) !== formatMetric(second)}
                delta={before === null || after === null ? <Nothing /> : signed(after - before, shorter)}
              />
            );
          })}
        </Two>
      )}
    </Section>
  );
}

/** A difference of two metrics has digits that mean nothing. */
function shorter(value: number): string {
  return String(Number(value.toPrecision(6)));
}

/** With its sign: +1.5 KiB. */
function signed(value: number, format: (value: number) => string): string {
  return value > 0 ? `+${format(value)}` : format(value);
}

function Components({ one, other }: Pair) {
  const names = namesOf(one.components, other.components);
  return (
    <Section id="components" title="Components">
      {names.length === 0 ? (
        <EmptyState title="Neither has components" />
      ) : (
        <Two label="Components" one={one} other={other} delta>
          {names.map((name) => {
            const [first, second] = [one.components[name], other.components[name]];
            const [before, after] = [first?.logical_bytes ?? 0, second?.logical_bytes ?? 0];
            return (
              <Line
                key={name}
                name={name}
                one={<Bytes count={first?.logical_bytes} />}
                other={<Bytes count={second?.logical_bytes} />}
                differs={first?.logical_bytes !== second?.logical_bytes}
                delta={signed(after - before, formatBytes)}
              />
            );
          })}
        </Two>
      )}
    </Section>
  );
}

function Configs({ one, other }: Pair) {
  const [first, second] = [useAttempt(one), useAttempt(other)];
  const isSame = one.project === other.project && one.run === other.run && one.attempt === other.attempt;
  if (isSame) {
    return (
      <Section id="configs" title="Configuration and environment">
        <p className="quiet">Both were saved by attempt {one.attempt} of one run: they have one of each.</p>
      </Section>
    );
  }
  return (
    <>
      <Section id="configs" title="Configuration">
        <Both first={first.config} second={second.config} what="the configurations">
          {(before, after) =>
            before.config === null && after.config === null ? (
              <EmptyState title="Neither attempt gave a configuration">
                <p>
                  A script gives it with <code>Checkpointer(config=…)</code>.
                </p>
              </EmptyState>
            ) : (
              <Differences
                one={one}
                other={other}
                found={changesOf(before.config, after.config)}
                what="configurations"
              />
            )
          }
        </Both>
      </Section>
      <Section id="environments" title="Environment">
        <Both first={first.attempt} second={second.attempt} what="the environments">
          {(before, after) => (
            <>
              <Differences
                one={one}
                other={other}
                found={changesOf(before.environment, after.environment)}
                what="environments"
              />
              <p className="quiet">
                Their attempts went on from{" "}
                {before.resumed_from === null ? "nothing" : <ById id={before.resumed_from} />} and{" "}
                {after.resumed_from === null ? "nothing" : <ById id={after.resumed_from} />}.
              </p>
            </>
          )}
        </Both>
      </Section>
    </>
  );
}

function useAttempt({ project, run, attempt }: CheckpointView) {
  const config = useFound(configQuery(project, run, attempt));
  const found = useQuery("get", "/v1/projects/{project}/runs/{run}/attempts/{number}", {
    params: { path: { project, run, number: attempt } },
  });
  return { config, attempt: found };
}

interface Loaded<Data> {
  data: Data | undefined;
  error: unknown;
  refetch: () => unknown;
}

function Both<Data>(props: {
  first: Loaded<Data>;
  second: Loaded<Data>;
  what: string;
  children: (first: Data, second: Data) => ReactNode;
}) {
  const { first, second, what, children } = props;
  if (first.data !== undefined && second.data !== undefined) return children(first.data, second.data);
  const failed = [first, second].find((each) => each.error && each.data === undefined);
  if (failed !== undefined) return <ErrorState error={failed.error} onRetry={() => void failed.refetch()} />;
  return <Loading what={what} />;
}

const MOST_DIFFERENCES = 200;

function Differences(props: Pair & { found: Change[]; what: string }) {
  const { one, other, found, what } = props;
  if (found.length === 0) return <p className="quiet">The {what} are the same.</p>;
  return (
    <>
      <Two label={`Where the ${what} differ`} one={one} other={other}>
        {found.slice(0, MOST_DIFFERENCES).map(({ path, before, after }) => (
          <Line key={path} name={path} one={<Value of={before} />} other={<Value of={after} />} differs />
        ))}
      </Two>
      {found.length > MOST_DIFFERENCES && (
        <p className="quiet">
          The first {MOST_DIFFERENCES} of {formatCount(found.length)} differences.
        </p>
      )}
    </>
  );
}

function Value({ of }: { of: unknown }) {
  if (of === undefined) return <Nothing why="not there" />;
  return <code>{typeof of === "string" ? of : JSON.stringify(of)}</code>;
}

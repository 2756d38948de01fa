import { useNavigate, useSearch } from "@tanstack/react-router";
import { type Schemas, usePages } from "@/api/client";
import { Allowed } from "@/app/Allowed";
import { useProject } from "@/app/project";
import { Choice } from "@/components/choose/Choice";
import { type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { Fact, Facts } from "@/components/facts/Facts";
import { EmptyState } from "@/components/states";
import { Age, Nothing, Time } from "@/components/values";
import { changesOf } from "@/format/changes";
import { formatCount } from "@/format/numbers";
import { RunName } from "@/runs/RunName";
import { formatValue, sameOf, summaryOf } from "../changes";
import styles from "../Operations.module.css";
import { Details, Everywhere, Period, TextFilter } from "../parts";
import type { ActorKind, AuditSearch } from "../route";

type AuditEventView = Schemas["AuditEventView"];

const ACTOR_KINDS: readonly ActorKind[] = ["person", "controller"];
/** What the actions begin with, for those who do not know them. */
const NOUNS = [
  "checkpoint.",
  "run.",
  "project.",
  "hold.",
  "policy.",
  "token.",
  "webhook.",
  "controller.",
  "operation.",
];
const DELETIONS = ["checkpoint.trash", "checkpoint.expire", "checkpoint.delete", "run.delete", "project.delete"];
const KNOWN = [...NOUNS, ...DELETIONS].sort();

const column = createColumnHelper<AuditEventView>();
const COLUMNS: Columns<AuditEventView> = [
  column.accessor("at", {
    header: "When",
    size: 205,
    meta: { phone: false },
    cell: ({ getValue }) => <Time at={getValue()} />,
  }),
  column.display({ id: "ago", header: "Ago", size: 118, cell: ({ row }) => <Age since={row.original.at} /> }),
  column.accessor("actor", {
    header: "Who",
    size: 115,
    cell: ({ getValue }) => <span title={getValue()}>{getValue()}</span>,
  }),
  column.accessor("actor_kind", { header: "Kind", size: 90, meta: { phone: false } }),
  column.accessor("action", { header: "Action", size: 150 }),
  column.display({
    id: "target",
    header: "Target",
    size: 200,
    meta: { phone: false },
    cell: ({ row }) => <Target of={row.original} />,
  }),
  column.display({
    id: "what",
    header: "What changed",
    size: 300,
    meta: { phone: false },
    cell: ({ row: { original: event } }) => {
      const text = summaryOf(event.before, event.after);
      return text === "" ? <Nothing /> : <span title={text}>{text}</span>;
    },
  }),
  column.accessor("reason", {
    header: "Reason",
    size: 170,
    meta: { phone: false },
    cell: ({ getValue }) => {
      const text = getValue();
      return text ? <span title={text}>{text}</span> : <Nothing />;
    },
  }),
];

function Target({ of }: { of: AuditEventView }) {
  if (of.project === null) return "the whole service";
  return (
    <>
      {of.run === null ? of.project : <RunName project={of.project} run={of.run} />}
      {of.step !== null && `, step ${formatCount(of.step)}`}
    </>
  );
}

export function Audit() {
  return (
    <Allowed scope="read" what="Audit">
      <AuditList />
    </Allowed>
  );
}

function AuditList() {
  const search = useSearch({ from: "/operations/audit" });
  const navigate = useNavigate({ from: "/operations/audit" });
  const project = useProject();
  const { actor, actor_kind, action, deletions, run, checkpoint, since, until, everywhere, event } = search;
  const set = (changed: AuditSearch) => void navigate({ search: (old) => ({ ...old, ...changed }) });
  const pages = usePages("/v1/audit-events", {
    query: {
      // A run is named with its project.
      ...(everywhere ? {} : { project, run }),
      ...{ actor, actor_kind, checkpoint, since, until },
      action: deletions ? DELETIONS : action === undefined ? undefined : [action],
      limit: 100,
    },
  });
  const shown = pages.items.find((each) => each.id === event);
  const filters = [actor, actor_kind, action, deletions, run, checkpoint, since, until];

  return (
    <>
      <div className={styles.bar}>
        <Everywhere
          project={project}
          everywhere={everywhere ?? false}
          onChange={(value) => set({ everywhere: value, run: undefined })}
        />
        <TextFilter label="Who" value={actor} onChange={(value) => set({ actor: value })} />
        <Choice
          className={styles.filter}
          label="Person or controller"
          value={actor_kind}
          offered={ACTOR_KINDS}
          onChange={(value) => set({ actor_kind: value })}
        />
        <TextFilter
          label="Action begins with"
          value={deletions ? undefined : action}
          known={KNOWN}
          onChange={(value) => set({ action: value, deletions: undefined })}
        />
        <label>
          <input
            type="checkbox"
            checked={deletions ?? false}
            onChange={(change) => set({ action: undefined, deletions: change.target.checked || undefined })}
          />{" "}
          Deletions only
        </label>
        {!everywhere && <TextFilter label="Run" value={run} onChange={(value) => set({ run: value })} />}
        <TextFilter label="Checkpoint, by its id" value={checkpoint} onChange={(value) => set({ checkpoint: value })} />
        <Period since={since} until={until} onChange={set} />
      </div>
      <DataTable
        label="Audit events"
        columns={COLUMNS}
        pages={pages}
        rowKey={(each) => String(each.id)}
        onOpen={(each) => set({ event: each.id })}
        empty={
          <EmptyState title="No change is here">
            <p>
              {filters.some((each) => each !== undefined)
                ? "None fits the filters: widen them, or look at every project."
                : "Each change by a person or a controller makes one."}
            </p>
          </EmptyState>
        }
      />
      {event !== undefined && !pages.isPending && (
        <Details title={shown?.action ?? `Audit event ${event}`} onClose={() => set({ event: undefined })}>
          {shown === undefined ? (
            <p>It is not among the rows that are loaded. Close this, and scroll down or filter until it is.</p>
          ) : (
            <OneEvent of={shown} />
          )}
        </Details>
      )}
    </>
  );
}

function OneEvent({ of }: { of: AuditEventView }) {
  const changes = changesOf(of.before ?? {}, of.after ?? {}, { lists: true });
  const same = sameOf(of.before, of.after);
  return (
    <>
      <Facts>
        <Fact name="When">
          <Time at={of.at} />
        </Fact>
        <Fact name="Who">
          {of.actor} ({of.actor_kind}
          {of.token_id !== null && (
            <>
              , token <code>{of.token_id}</code>
            </>
          )}
          )
        </Fact>
        <Fact name="Target">
          <Target of={of} />
          {of.checkpoint_id !== null && (
            <>
              , checkpoint <code>{of.checkpoint_id}</code>
            </>
          )}
        </Fact>
        <Fact name="Reason">{of.reason || <Nothing why="none given" />}</Fact>
      </Facts>
      {changes.length + same.length > 0 && (
        <section className={styles.changes}>
          <h3>What changed</h3>
          <table>
            <thead>
              <tr>
                <th scope="col">Field</th>
                <th scope="col">Before</th>
                <th scope="col">After</th>
              </tr>
            </thead>
            <tbody>
              {[...changes, ...same].map(({ path, before, after }, index) => (
                <tr key={path} className={index < changes.length ? undefined : "quiet"}>
                  <th scope="row">{path.replaceAll("_", " ")}</th>
                  <td>{formatValue(before)}</td>
                  <td>{formatValue(after)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </section>
      )}
    </>
  );
}

import { Link } from "@tanstack/react-router";
import { useMemo, useState } from "react";
import { type Pages, type Schemas, usePages, useQuery } from "@/api/client";
import { failureOf } from "@/api/problem";
import { useSession } from "@/api/session";
import { Can } from "@/components/Can";
import { type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState, ErrorState } from "@/components/states";
import { useNow } from "@/components/useNow";
import { Bytes, Nothing, Time } from "@/components/values";
import { formatSeconds } from "@/format/moments";
import { formatCount, plural } from "@/format/numbers";
import { RunName } from "@/runs/RunName";
import { type TakenBack, takeBack, takeProjectBack, takeRunBack } from "./actions";
import { Back } from "./Done";
import styles from "./Retention.module.css";

/** What was deleted and can be taken back, until its purge. */
export function TrashTab({ project, run }: { project: string; run: string | undefined }) {
  if (run !== undefined) return <TrashOfRun project={project} run={run} />;
  return (
    <>
      <section aria-labelledby="of-all-runs">
        <h2 id="of-all-runs">Checkpoints of all runs, run by run</h2>
        <TrashOfProject project={project} />
      </section>
      <DeletedRuns project={project} />
      <DeletedProjects />
    </>
  );
}

type CheckpointView = Schemas["CheckpointView"];

/** How long something can still be taken back. */
function PurgeIn({ at }: { at: string | null | undefined }) {
  const now = useNow();
  if (at == null) return <Nothing />;
  const seconds = (Date.parse(at) - now) / 1000;
  return (
    <>
      {seconds > 0 ? `in ${formatSeconds(seconds)}, ` : "due since "}
      <Time at={at} />
    </>
  );
}

const BY: Record<string, string> = { policy: "the policy", person: "a person", run: "with its run" };

const column = createColumnHelper<CheckpointView>();
const COLUMNS: Columns<CheckpointView> = [
  column.accessor("step", {
    header: "Step",
    size: 80,
    meta: { align: "right" },
    cell: ({ getValue }) => formatCount(getValue()),
  }),
  column.accessor("attempt", { header: "Attempt", size: 90, meta: { align: "right", phone: false } }),
  column.display({
    id: "purge",
    header: "Purge",
    size: 330,
    cell: ({ row: { original } }) =>
      original.state === "trashed" ? (
        <PurgeIn at={original.purge_at} />
      ) : (
        <StateBadge state="being purged" tone="bad" />
      ),
  }),
  column.accessor("trashed_by", {
    header: "By",
    size: 100,
    meta: { phone: false },
    cell: ({ getValue, row }) => (
      <Link
        to="/checkpoints/$id"
        params={{ id: row.original.id }}
        search={{ part: "history" }}
        title="Who, when and why"
        aria-label={`Who moved step ${row.original.step} of attempt ${row.original.attempt} to the trash`}
      >
        {BY[getValue() ?? ""] ?? getValue() ?? "unknown"}
      </Link>
    ),
  }),
  column.accessor("trash_reason", {
    header: "Why",
    size: 220,
    meta: { phone: false },
    cell: ({ getValue }) =>
      getValue() ? <span title={getValue() ?? ""}>{getValue()}</span> : <Nothing why="no reason was given" />,
  }),
  column.accessor("logical_bytes", {
    header: "State",
    size: 95,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
  column.display({
    id: "undo",
    header: "",
    size: 110,
    cell: ({ row: { original } }) => <TakeOneBack checkpoint={original} />,
  }),
];

function TakeOneBack({ checkpoint }: { checkpoint: CheckpointView }) {
  const [failed, setFailed] = useState("");
  const [busy, setBusy] = useState(false);
  const reason =
    checkpoint.state !== "trashed"
      ? "Its purge has begun: it cannot be taken back."
      : checkpoint.trashed_by === "run"
        ? "It was deleted with its run: take the run back."
        : busy
          ? "It is being taken back."
          : undefined;

  async function undo() {
    setBusy(true);
    const { failures } = await takeBack([checkpoint.id]);
    setBusy(false);
    setFailed(failures[0] === undefined ? "" : failureOf(failures[0].error).detail);
  }

  return (
    <Can scope="operate" reason={reason} hint={failed || undefined}>
      <button
        type="button"
        aria-label={`Take step ${checkpoint.step} of attempt ${checkpoint.attempt} of ${checkpoint.run} back`}
        onClick={() => void undo()}
      >
        {failed === "" ? "Undo" : "Retry"}
      </button>
    </Can>
  );
}

const WITH_RUN: Columns<CheckpointView> = [
  column.accessor("run", {
    header: "Run",
    size: 150,
    cell: ({ row: { original } }) => <RunName project={original.project} run={original.run} />,
  }),
  ...COLUMNS,
];

const IN_TRASH: Schemas["CheckpointState"][] = ["trashed", "deleting"];
const QUERY = { state: IN_TRASH, limit: 200 };

function TrashOfRun({ project, run }: { project: string; run: string }) {
  const pages = usePages("/v1/projects/{project}/runs/{run}/checkpoints", { path: { project, run }, query: QUERY });
  return <Trashed pages={pages} columns={COLUMNS} empty="Nothing of this run is in the trash" />;
}

function TrashOfProject({ project }: { project: string }) {
  const pages = usePages("/v1/projects/{project}/checkpoints", { path: { project }, query: QUERY });
  return <Trashed pages={pages} columns={WITH_RUN} empty={`No checkpoint of ${project} is in the trash`} />;
}

const NONE: ReadonlySet<string> = new Set();

function isTakenBackAlone(checkpoint: CheckpointView): boolean {
  return checkpoint.state === "trashed" && checkpoint.trashed_by !== "run";
}

interface TrashedProps {
  pages: Pages<CheckpointView>;
  columns: Columns<CheckpointView>;
  empty: string;
}

/** Checkpoints in the trash, to be taken back one by one or many at once. */
function Trashed({ pages, columns, empty }: TrashedProps) {
  const [chosen, setChosen] = useState(NONE);
  const [back, setBack] = useState<TakenBack | null>(null);
  const [busy, setBusy] = useState(false);
  const ids = useMemo(
    () => pages.items.filter((each) => isTakenBackAlone(each) && chosen.has(each.id)).map((each) => each.id),
    [pages.items, chosen],
  );

  async function undo() {
    setBusy(true);
    const done = await takeBack(ids);
    setBack(done);
    // What is not back stays chosen, to be tried again.
    setChosen(new Set(done.failures.map((each) => each.id)));
    setBusy(false);
  }

  const reason = busy ? "They are being taken back." : ids.length === 0 ? "Nothing is chosen." : undefined;
  return (
    <>
      {back !== null && (
        <div className={styles.done}>
          <Back back={back} />
          <button type="button" onClick={() => setBack(null)}>
            Close
          </button>
        </div>
      )}
      {pages.items.length > 0 && (
        <div className={styles.bar}>
          <Can scope="operate" reason={reason}>
            <button type="button" onClick={() => void undo()}>
              Take {plural(ids.length, "chosen checkpoint")} back
            </button>
          </Can>
        </div>
      )}
      <DataTable
        label="Checkpoints in the trash"
        columns={columns}
        pages={pages}
        rowKey={(row) => row.id}
        selected={chosen}
        onSelect={setChosen}
        empty={
          <EmptyState title={empty}>
            <p>What a policy expires and what a person prunes is here until its purge.</p>
          </EmptyState>
        }
      />
    </>
  );
}

interface Deleted {
  name: string;
  in_trash?: Schemas["InTrash"] | null;
}

const deleted = createColumnHelper<Deleted>();
const DELETED: Columns<Deleted> = [
  deleted.accessor("name", { header: "Name", size: 180 }),
  deleted.accessor("in_trash.deleted_by", { header: "By", size: 120, meta: { phone: false } }),
  deleted.accessor("in_trash.reason", {
    header: "Why",
    size: 200,
    meta: { phone: false },
    cell: ({ getValue }) => getValue() ?? <Nothing why="no reason was given" />,
  }),
  deleted.accessor("in_trash.purge_at", {
    header: "Purge",
    size: 330,
    cell: ({ getValue }) => <PurgeIn at={getValue()} />,
  }),
];

function DeletedRuns({ project }: { project: string }) {
  const pages = usePages("/v1/projects/{project}/runs", { path: { project }, query: { deleted: true, limit: 100 } });
  const [error, setError] = useState<unknown>(null);
  const columns = useMemo<Columns<Deleted>>(
    () => [
      ...DELETED,
      deleted.display({
        id: "undo",
        header: "",
        size: 110,
        cell: ({ row }) => (
          <Can scope="operate">
            <button
              type="button"
              aria-label={`Take the run ${row.original.name} back`}
              onClick={() => takeRunBack(project, row.original.name).then(() => setError(null), setError)}
            >
              Undo
            </button>
          </Can>
        ),
      }),
    ],
    [project],
  );
  return (
    <section aria-labelledby="deleted-runs">
      <h2 id="deleted-runs">Deleted runs</h2>
      {error !== null && <ErrorState error={error} />}
      <DataTable
        label="Deleted runs"
        columns={columns}
        pages={pages}
        rowKey={(row) => row.name}
        empty={<EmptyState title="No whole run is in the trash" />}
      />
    </section>
  );
}

function DeletedProjects() {
  const { project } = useSession();
  const found = useQuery(
    "get",
    "/v1/projects",
    { params: { query: { deleted: true, limit: 100 } } },
    { enabled: project === null },
  );
  const [error, setError] = useState<unknown>(null);
  const items = found.data?.items ?? [];
  if (items.length === 0)
    return found.error ? <ErrorState error={found.error} onRetry={() => void found.refetch()} /> : null;
  return (
    <section aria-labelledby="deleted-projects">
      <h2 id="deleted-projects">Deleted projects</h2>
      {error !== null && <ErrorState error={error} />}
      <ul className="panel">
        {items.map(({ name, in_trash }) => (
          <li key={name} className="row">
            <strong>{name}</strong>
            <span>
              deleted by {in_trash?.deleted_by}
              {in_trash?.reason ? `: ${in_trash.reason}` : ""}; purge <PurgeIn at={in_trash?.purge_at} />
            </span>
            <Can scope="admin">
              <button
                type="button"
                aria-label={`Take the project ${name} back`}
                onClick={() => takeProjectBack(name).then(() => setError(null), setError)}
              >
                Undo
              </button>
            </Can>
          </li>
        ))}
      </ul>
    </section>
  );
}

import { Link, useSearch } from "@tanstack/react-router";
import { useMemo, useState } from "react";
import { api, type Schemas, usePages } from "@/api/client";
import { useSession } from "@/api/session";
import { Allowed } from "@/app/Allowed";
import { Can } from "@/components/Can";
import { type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState } from "@/components/states";
import { Bytes, Nothing, Time } from "@/components/values";
import { formatCount, formatShare } from "@/format/numbers";
import { QUOTA_NEAR, quotaShare } from "@/storage/share_of_quota";
import styles from "../Operations.module.css";
import { type Action, ActionReport, useAction } from "../parts";
import { DeleteProject } from "./DeleteProject";
import { QuotaDialog } from "./QuotaDialog";

type ProjectView = Schemas["ProjectView"];

const LIST = "/v1/projects";

export function Projects() {
  return (
    <Allowed scope="read" what="Projects">
      <ProjectList />
    </Allowed>
  );
}

function ProjectList() {
  const { deleted } = useSearch({ from: "/operations/projects" });
  const session = useSession();
  const pages = usePages(LIST, { query: { deleted: deleted ?? false, limit: 100 } });
  const action = useAction(LIST);
  const [editing, setEditing] = useState<ProjectView | "new" | null>(null);
  const [deleting, setDeleting] = useState<ProjectView | null>(null);
  const { run, busy } = action;
  const columns = useMemo(
    () =>
      deleted
        ? makeTrashColumns((of) => <Undelete of={of} run={run} busy={busy} />)
        : makeColumns((of) => <Actions of={of} onEdit={setEditing} onDelete={setDeleting} />),
    [deleted, run, busy],
  );
  const own = session.project === null ? undefined : `The token “${session.name}” belongs to one project.`;

  return (
    <>
      <div className={styles.bar}>
        <nav aria-label="Projects" className="row">
          <Link to="/operations/projects" activeOptions={{ exact: true }} aria-current={deleted ? undefined : "page"}>
            In use
          </Link>
          <Link to="/operations/projects" search={{ deleted: true }} aria-current={deleted ? "page" : undefined}>
            In the trash
          </Link>
        </nav>
        <Can scope="admin" reason={own}>
          <button type="button" className="primary" onClick={() => setEditing("new")}>
            New project
          </button>
        </Can>
      </div>
      <ActionReport of={action} />
      <DataTable
        label={deleted ? "Projects in the trash" : "Projects"}
        columns={columns}
        pages={pages}
        rowKey={(each) => each.id}
        empty={
          deleted ? (
            <EmptyState title="No project is in the trash" />
          ) : (
            <EmptyState title="No project is here yet">
              <p>“New project” makes one. A training script with a token for every project makes its own.</p>
            </EmptyState>
          )
        }
      />
      {editing !== null && <QuotaDialog of={editing === "new" ? null : editing} onClose={() => setEditing(null)} />}
      {deleting && <DeleteProject of={deleting} onClose={() => setDeleting(null)} />}
    </>
  );
}

const column = createColumnHelper<ProjectView>();

function makeColumns(actions: (of: ProjectView) => React.ReactNode): Columns<ProjectView> {
  return [
    column.accessor("name", {
      header: "Project",
      size: 100,
      cell: ({ getValue }) => (
        <Link to="/runs" search={{ project: getValue() }} title={getValue()}>
          {getValue()}
        </Link>
      ),
    }),
    column.accessor("runs", {
      header: "Runs",
      size: 70,
      meta: { align: "right", phone: false },
      cell: ({ getValue }) => formatCount(getValue()),
    }),
    column.accessor("stored_bytes", {
      header: "Stored, in all",
      size: 110,
      meta: { align: "right" },
      cell: ({ getValue }) => <Bytes count={getValue()} />,
    }),
    column.accessor("quota_bytes", {
      header: "Quota",
      size: 95,
      meta: { align: "right", phone: false },
      cell: ({ getValue }) => (getValue() === null ? "no limit" : <Bytes count={getValue()} />),
    }),
    column.display({
      id: "used",
      header: "Used",
      size: 170,
      meta: { phone: false },
      cell: ({ row }) => <Used of={row.original} />,
    }),
    column.accessor("logical_bytes", {
      header: "States",
      size: 95,
      meta: { align: "right", phone: false },
      cell: ({ getValue }) => <Bytes count={getValue()} />,
    }),
    column.accessor("created_at", {
      header: "Made",
      size: 175,
      meta: { phone: false },
      cell: ({ getValue }) => <Time at={getValue()} />,
    }),
    column.display({ id: "actions", header: "Actions", size: 178, cell: ({ row }) => actions(row.original) }),
  ];
}

function makeTrashColumns(actions: (of: ProjectView) => React.ReactNode): Columns<ProjectView> {
  return [
    column.accessor("name", { header: "Project", size: 150 }),
    column.accessor("stored_bytes", {
      header: "Stored",
      size: 95,
      meta: { align: "right", phone: false },
      cell: ({ getValue }) => <Bytes count={getValue()} />,
    }),
    column.accessor("in_trash.deleted_by", { header: "Deleted by", size: 110 }),
    column.accessor("in_trash.deleted_at", {
      header: "Deleted",
      size: 175,
      meta: { phone: false },
      cell: ({ getValue }) => <Time at={getValue()} />,
    }),
    column.accessor("in_trash.reason", {
      header: "Reason",
      size: 180,
      meta: { phone: false },
      cell: ({ getValue }) => getValue() || <Nothing />,
    }),
    column.accessor("in_trash.purge_at", {
      header: "Purged",
      size: 175,
      meta: { phone: false },
      cell: ({ getValue }) => <Time at={getValue()} />,
    }),
    column.display({ id: "actions", header: "Actions", size: 110, cell: ({ row }) => actions(row.original) }),
  ];
}

function Used({ of }: { of: ProjectView }) {
  if (of.quota_bytes === null) return <Nothing why="no limit" />;
  const share = quotaShare(of.quota_used_bytes, of.quota_bytes);
  return (
    <span className={styles.progress}>
      <progress max={1} value={Math.min(1, share)} aria-label={`Used of the quota of ${of.name}`} />
      {formatShare(share)}
      {share >= QUOTA_NEAR && <StateBadge state={share >= 1 ? "full" : "near"} tone={share >= 1 ? "bad" : "warn"} />}
    </span>
  );
}

interface ActionsProps {
  of: ProjectView;
  onEdit: (of: ProjectView) => void;
  onDelete: (of: ProjectView) => void;
}

function Actions({ of, onEdit, onDelete }: ActionsProps) {
  const session = useSession();
  const bound = session.project === null ? undefined : `The token “${session.name}” belongs to one project.`;
  return (
    <div className={styles.actions}>
      <Can scope="admin" reason={bound}>
        <button type="button" aria-label={`Edit the quotas of ${of.name}`} onClick={() => onEdit(of)}>
          Edit quotas
        </button>
      </Can>
      <Can scope="admin" reason={bound}>
        <button type="button" className="danger" aria-label={`Delete ${of.name}`} onClick={() => onDelete(of)}>
          Delete
        </button>
      </Can>
    </div>
  );
}

function Undelete({ of, run, busy }: { of: ProjectView; run: Action["run"]; busy: boolean }) {
  const params = { path: { project: of.name } };
  return (
    <div className={styles.actions}>
      <Can scope="admin" reason={busy ? "The last action is on its way." : undefined}>
        <button
          type="button"
          aria-label={`Take back ${of.name}`}
          onClick={() =>
            void run(
              () => api.POST("/v1/projects/{project}/undelete", { params }),
              `${of.name} is back, with its runs.`,
            )
          }
        >
          Take back
        </button>
      </Can>
    </div>
  );
}

import { useNavigate, useSearch } from "@tanstack/react-router";
import { useMemo, useState } from "react";
import { api, type Schemas, usePages } from "@/api/client";
import { Allowed } from "@/app/Allowed";
import { useProject } from "@/app/project";
import { Can } from "@/components/Can";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { EmptyState } from "@/components/states";
import { Time } from "@/components/values";
import { formatCount } from "@/format/numbers";
import { refresh } from "@/live/refresh";
import styles from "../Operations.module.css";
import { type Action, ActionReport, useAction } from "../parts";
import { Secret } from "../Secret";
import { CreateWebhook } from "./CreateWebhook";
import { DELIVERIES, Deliveries } from "./Deliveries";

type WebhookView = Schemas["WebhookView"];
type WebhookCreated = Schemas["WebhookCreated"];

const LIST = "/v1/projects/{project}/webhooks";

/** The webhooks of a project, and the calls of one of them. */
export function Webhooks() {
  const project = useProject();
  return (
    <Allowed scope="admin" what="Webhooks">
      {project === undefined ? (
        <EmptyState title="No project is here yet">
          <p>A webhook tells of one project. Make the project first: see the tab Projects.</p>
        </EmptyState>
      ) : (
        <OfProject project={project} key={project} />
      )}
    </Allowed>
  );
}

function OfProject({ project }: { project: string }) {
  const { webhook } = useSearch({ from: "/operations/webhooks" });
  const navigate = useNavigate({ from: "/operations/webhooks" });
  const pages = usePages(LIST, { path: { project }, query: { limit: 100 } });
  const action = useAction(LIST, DELIVERIES);
  const [creating, setCreating] = useState(false);
  const [deleting, setDeleting] = useState<WebhookView | null>(null);
  const [created, setCreated] = useState<WebhookCreated | null>(null);
  const { run, busy } = action;
  const open = (id: string | undefined) => void navigate({ search: (old) => ({ ...old, webhook: id }) });

  // biome-ignore lint/correctness/useExhaustiveDependencies: `open` only navigates; the columns stay.
  const columns = useMemo(
    () => makeColumns((hook) => <Actions of={hook} run={run} busy={busy} onTest={open} onDelete={setDeleting} />),
    [run, busy],
  );

  async function remove(hook: WebhookView) {
    await api.DELETE("/v1/webhooks/{webhook_id}", { params: { path: { webhook_id: hook.id } } });
    if (hook.id === webhook) open(undefined);
    void refresh(LIST);
  }

  return (
    <>
      <div className={styles.bar}>
        <span className="quiet">
          What the service calls when something happens in {project}. Open a row for its calls.
        </span>
        <Can scope="admin">
          <button type="button" className="primary" onClick={() => setCreating(true)}>
            New webhook
          </button>
        </Can>
      </div>
      <ActionReport of={action} />
      <DataTable
        label="Webhooks"
        columns={columns}
        pages={pages}
        rowKey={(hook) => hook.id}
        onOpen={(hook) => open(hook.id)}
        empty={
          <EmptyState title={`${project} has no webhook`}>
            <p>“New webhook” has the service call Slack, PagerDuty, Alertmanager or a program of your own.</p>
          </EmptyState>
        }
      />
      {webhook !== undefined && <Deliveries id={webhook} key={webhook} />}
      {creating && (
        <CreateWebhook
          project={project}
          onCreated={(hook) => {
            setCreated(hook);
            void refresh(LIST);
          }}
          onClose={() => setCreating(false)}
        />
      )}
      {created?.secret && (
        <Secret
          title="The webhook's secret"
          secret={created.secret}
          name={created.url}
          onClose={() => setCreated(null)}
        >
          <p>
            It signs each call to {created.url}, as Standard Webhooks does: the receiver needs it to know that a call is
            from this service.
          </p>
        </Secret>
      )}
      {deleting && (
        <ConfirmDialog
          title="Delete the webhook?"
          action="Delete"
          onConfirm={() => remove(deleting)}
          onClose={() => setDeleting(null)}
        >
          <p>
            {deleting.url} is called no more: {formatCount(deleting.waiting)} waiting{" "}
            {deleting.waiting === 1 ? "call is" : "calls are"} not made, and its secret is gone for good.
          </p>
        </ConfirmDialog>
      )}
    </>
  );
}

function makeColumns(actions: (of: WebhookView) => React.ReactNode): Columns<WebhookView> {
  const column = createColumnHelper<WebhookView>();
  return [
    column.accessor("url", {
      header: "Called",
      size: 215,
      cell: ({ getValue }) => <span title={getValue()}>{getValue()}</span>,
    }),
    column.accessor("format", { header: "Format", size: 110, meta: { phone: false } }),
    column.accessor("events", {
      header: "Events",
      size: 210,
      meta: { phone: false },
      cell: ({ getValue }) => <span title={getValue().join(", ")}>{getValue().join(", ")}</span>,
    }),
    column.accessor("waiting", {
      header: "Waiting",
      size: 80,
      meta: { align: "right", phone: false },
      cell: ({ getValue }) => formatCount(getValue()),
    }),
    column.accessor("given_up", {
      header: "Given up",
      size: 95,
      meta: { align: "right", phone: false },
      cell: ({ getValue }) => formatCount(getValue()),
    }),
    column.accessor("created_by", { header: "Made by", size: 100, meta: { phone: false } }),
    column.accessor("created_at", {
      header: "Made",
      size: 180,
      meta: { phone: false },
      cell: ({ getValue }) => <Time at={getValue()} />,
    }),
    column.display({ id: "actions", header: "Actions", size: 140, cell: ({ row }) => actions(row.original) }),
  ];
}

interface ActionsProps {
  of: WebhookView;
  run: Action["run"];
  busy: boolean;
  onTest: (id: string) => void;
  onDelete: (of: WebhookView) => void;
}

function Actions({ of, run, busy, onTest, onDelete }: ActionsProps) {
  const params = { path: { webhook_id: of.id } };
  async function test() {
    await run(
      () => api.POST("/v1/webhooks/{webhook_id}/test", { params }),
      "A test call is on its way: see it among the calls below.",
    );
    onTest(of.id);
  }
  return (
    <div className={styles.actions}>
      <Can scope="admin" reason={busy ? "The last action is on its way." : undefined}>
        <button type="button" aria-label={`Test ${of.url}`} onClick={() => void test()}>
          Test
        </button>
      </Can>
      <Can scope="admin">
        <button type="button" className="danger" aria-label={`Delete ${of.url}`} onClick={() => onDelete(of)}>
          Delete
        </button>
      </Can>
    </div>
  );
}

import { useMemo } from "react";
import { api, type Schemas, usePages, useQuery } from "@/api/client";
import { useOnce } from "@/api/repeats";
import { Can } from "@/components/Can";
import { type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState } from "@/components/states";
import { Nothing, Time } from "@/components/values";
import { formatCount } from "@/format/numbers";
import { OTHERWISE_MS, WHILE_RUNNING_MS } from "@/live/refresh";
import { ActionReport, useAction } from "../parts";

type DeliveryView = Schemas["DeliveryView"];

export const DELIVERIES = "/v1/webhooks/{webhook_id}/deliveries";

/** The word for a call: it has arrived, it will not, it is retried, or it was not tried yet. */
export function stateOf(of: DeliveryView): { state: string; tone: "good" | "warn" | "bad" | "calm" } {
  if (of.delivered_at !== null) return { state: "delivered", tone: "good" };
  if (of.given_up_at !== null) return { state: "given up", tone: "bad" };
  if (of.tries > 0) return { state: "retrying", tone: "warn" };
  return { state: "waiting", tone: "calm" };
}

const column = createColumnHelper<DeliveryView>();
const COLUMNS: Columns<DeliveryView> = [
  column.accessor("created_at", {
    header: "When",
    size: 175,
    meta: { phone: false },
    cell: ({ getValue }) => <Time at={getValue()} />,
  }),
  column.accessor("event", { header: "Event", size: 160 }),
  column.display({
    id: "state",
    header: "State",
    size: 110,
    cell: ({ row }) => <StateBadge {...stateOf(row.original)} />,
  }),
  column.accessor("tries", {
    header: "Tries",
    size: 60,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => formatCount(getValue()),
  }),
  column.accessor("next_try_at", {
    header: "Next try",
    size: 175,
    meta: { phone: false },
    cell: ({ getValue }) => <Time at={getValue()} />,
  }),
  column.accessor("last_status", {
    header: "Status",
    size: 70,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => getValue() ?? <Nothing />,
  }),
  column.accessor("last_error", {
    header: "Last error",
    size: 260,
    meta: { phone: false },
    cell: ({ getValue }) => {
      const text = getValue();
      return text === null ? <Nothing /> : <span title={text}>{text}</span>;
    },
  }),
  column.accessor("id", {
    header: "Call",
    size: 150,
    meta: { phone: false },
    cell: ({ getValue }) => <code>{getValue()}</code>,
  }),
];

const AGAIN = "/v1/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver";

/** What became of a webhook's calls. */
export function Deliveries({ id }: { id: string }) {
  const path = { webhook_id: id };
  const action = useAction(DELIVERIES, "/v1/projects/{project}/webhooks");
  const { run, busy } = action;
  const send = useOnce((delivery_id: string, key) =>
    api.POST(AGAIN, { params: { path: { ...path, delivery_id }, header: { "idempotency-key": key } } }),
  );
  // biome-ignore lint/correctness/useExhaustiveDependencies: `send` does the same in each rendering.
  const columns = useMemo<Columns<DeliveryView>>(
    () => [
      ...COLUMNS,
      column.display({
        id: "again",
        header: "",
        size: 120,
        cell: ({ row: { original } }) => (
          <Can scope="admin" reason={busy ? "The last action is on its way." : undefined}>
            <button
              type="button"
              aria-label={`Send ${original.event} ${original.id} again`}
              onClick={() => void run(() => send(original.id), `${original.id} is sent again: see its answer below.`)}
            >
              Send again
            </button>
          </Can>
        ),
      }),
    ],
    [run, busy],
  );
  const hook = useQuery("get", "/v1/webhooks/{webhook_id}", { params: { path } });
  const pages = usePages(
    DELIVERIES,
    { path, query: { limit: 100 } },
    { askedAgainAfter: (calls) => (calls.some((each) => each.next_try_at !== null) ? WHILE_RUNNING_MS : OTHERWISE_MS) },
  );
  return (
    <section aria-labelledby="calls">
      <h2 id="calls">Calls of {hook.data?.url ?? "the webhook"}</h2>
      <p className="quiet">
        The service retries a call that fails, later each time, until it gives up. Once the receiver works again, “Send
        again” has such a call made anew.
      </p>
      <ActionReport of={action} />
      <DataTable
        label="Calls"
        columns={columns}
        pages={pages}
        rowKey={(each) => each.id}
        empty={
          <EmptyState title="No call was made yet">
            <p>“Test” makes one, to see whether it arrives.</p>
          </EmptyState>
        }
      />
    </section>
  );
}

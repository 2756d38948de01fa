import { type Schemas, useQuery } from "@/api/client";
import { useSession } from "@/api/session";
import { useProjects } from "@/app/project";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState, ErrorState, Loading } from "@/components/states";
import { useNow } from "@/components/useNow";
import { Age } from "@/components/values";
import { RunName } from "@/runs/RunName";
import styles from "./AttentionList.module.css";
import { type Attention, findAttention } from "./attention";

const STATUSES: Schemas["RunStatus"][] = ["stalled", "lost", "failed", "training"];
const EVENTS: Schemas["EventType"][] = [
  "checkpoint.quarantined",
  "checkpoint.corrupt",
  "store.unavailable",
  "store.available",
];
/** The newest runs and events that are looked at: the first page must be fast however large the catalog is. */
const LOOKED_AT = 100;

/** What needs somebody in a project, and for the whole service if the token sees all of it. */
export function AttentionList({ project }: { project: string }) {
  const session = useSession();
  const now = useNow();
  const path = { project };
  const runs = useQuery("get", "/v1/projects/{project}/runs", {
    params: { path, query: { status: STATUSES, limit: LOOKED_AT } },
  });
  const badCopies = useQuery("get", "/v1/projects/{project}/bad-copies", {
    params: { path, query: { limit: LOOKED_AT } },
  });
  const events = useQuery("get", "/v1/events", { params: { query: { project, type: EVENTS, limit: LOOKED_AT } } });
  const stores = useQuery("get", "/v1/stores", {}, { enabled: session.project === null });
  const projects = useProjects();

  const asked = [runs, badCopies, events, stores, projects];
  const failed = asked.find((query) => query.error && query.data === undefined);
  if (asked.some((query) => query.isLoading)) return <Loading what="what needs somebody" />;

  const found = findAttention(
    {
      runs: runs.data?.items ?? [],
      badCopies: badCopies.data?.items ?? [],
      events: events.data?.items ?? [],
      stores: stores.data?.items ?? [],
      project: projects.data?.items.find((each) => each.name === project),
    },
    now,
  );
  return (
    <>
      {failed && <ErrorState error={failed.error} onRetry={() => void failed.refetch()} />}
      {found.length > 0 && (
        <ul className={styles.list}>
          {found.map((each) => (
            <Item key={each.key} project={project} attention={each} />
          ))}
        </ul>
      )}
      {found.length === 0 && !failed && (
        <EmptyState title="Nothing needs anybody">
          <p>No run is stalled, lost or without a restore point, no chunk is lost, and every store answers.</p>
        </EmptyState>
      )}
    </>
  );
}

function Item({ project, attention }: { project: string; attention: Attention }) {
  const { state, tone, subject, run, detail, since } = attention;
  return (
    <li className={styles.item}>
      <StateBadge state={state} tone={tone} />
      <span className={styles.subject}>
        {run === null ? (
          subject
        ) : (
          <RunName project={project} run={run}>
            {subject}
          </RunName>
        )}
      </span>
      <span className={styles.detail}>{detail}</span>
      {since !== null && (
        <span className={`quiet ${styles.since}`}>
          <Age since={since} /> ago
        </span>
      )}
    </li>
  );
}

import { type Schemas, usePages } from "@/api/client";
import { Changes } from "@/components/facts/Changes";
import { Section } from "@/components/facts/Facts";
import { EmptyState, ErrorState, Loading } from "@/components/states";
import { Time } from "@/components/values";
import styles from "../checkpoint.module.css";
import { HealthBadge } from "../HealthBadge";
import { changedBy, isOfHealth } from "./history";

type CheckpointView = Schemas["CheckpointView"];
type AuditEvent = Schemas["AuditEventView"];

/** How its health changed, and who changed what, the newest first. */
export function HistoryPart({ checkpoint }: { checkpoint: CheckpointView }) {
  const pages = usePages("/v1/audit-events", { query: { checkpoint: checkpoint.id, limit: 100 } });
  if (pages.isPending) return <Loading what="the history" />;
  if (pages.error && pages.items.length === 0) return <ErrorState error={pages.error} onRetry={pages.retry} />;
  return (
    <>
      <Section id="health-history" title="Health">
        <ol className={`panel ${styles.list}`} reversed>
          <li>
            <HealthBadge health={checkpoint.health} /> now{checkpoint.health_reason && `: ${checkpoint.health_reason}`}
          </li>
          {pages.items.filter(isOfHealth).map((event) => (
            <Entry key={event.id} event={event} />
          ))}
          {checkpoint.committed_at !== null && !pages.hasMore && (
            <li>
              <Time at={checkpoint.committed_at} /> committed
            </li>
          )}
        </ol>
      </Section>
      <Section id="changes" title="Who changed what">
        {pages.items.length === 0 ? (
          <EmptyState title="Nobody has changed it">
            <p>
              Here stands who edits, pins, holds, deletes or takes it back: persons and controllers, with the reason.
            </p>
          </EmptyState>
        ) : (
          <ol className={`panel ${styles.list}`} reversed>
            {pages.items.map((event) => (
              <Entry key={event.id} event={event} />
            ))}
          </ol>
        )}
        {pages.error ? <ErrorState error={pages.error} onRetry={pages.retry} /> : null}
        {pages.hasMore && (
          <button type="button" onClick={pages.loadMore} disabled={pages.isLoadingMore}>
            {pages.isLoadingMore ? "Loading…" : "Older ones"}
          </button>
        )}
      </Section>
    </>
  );
}

function Entry({ event }: { event: AuditEvent }) {
  const changes = changedBy(event);
  return (
    <li>
      <Time at={event.at} /> <strong>{event.actor}</strong>
      {event.actor_kind === "controller" && <span className="quiet"> (controller)</span>}:{" "}
      {event.action.replace(".", " ").replaceAll("_", " ")}
      {event.reason && <>, because {event.reason}</>}
      {changes.length > 0 && <Changes of={changes} />}
    </li>
  );
}

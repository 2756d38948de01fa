import type { ReactNode } from "react";
import { failureOf } from "@/api/problem";
import styles from "./states.module.css";

/** Nothing is there, and what to do about it. */
export function EmptyState({ title, children }: { title: string; children?: ReactNode }) {
  return (
    <div className={styles.state}>
      <p className={styles.title}>{title}</p>
      {children}
    </div>
  );
}

/** What failed, in the service's own words, and a way to try again. */
export function ErrorState({ error, onRetry }: { error: unknown; onRetry?: () => void }) {
  const failure = failureOf(error);
  return (
    <div className={`${styles.state} ${styles.failed}`} role="alert">
      <p className={styles.title}>{failure.title}</p>
      <p>{failure.detail}</p>
      {failure.code !== null && (
        <p className="quiet">
          <code>{failure.code}</code>
          {failure.requestId && (
            <>
              , request <code>{failure.requestId}</code>
            </>
          )}
        </p>
      )}
      {onRetry && (
        <button type="button" onClick={onRetry}>
          Retry
        </button>
      )}
    </div>
  );
}

export function Loading({ what }: { what: string }) {
  return (
    <p className={`quiet ${styles.loading}`} role="status">
      Loading {what}…
    </p>
  );
}

interface Loaded<Data> {
  data: Data | undefined;
  error: unknown;
  refetch: () => unknown;
}

/** The reply of a query, or why it is not there. A reply that is there stays while it is asked for again. */
export function Reply<Data>(props: { of: Loaded<Data>; what: string; children: (data: Data) => ReactNode }) {
  const { of, what, children } = props;
  if (of.data !== undefined) return children(of.data);
  if (of.error) return <ErrorState error={of.error} onRetry={() => void of.refetch()} />;
  return <Loading what={what} />;
}

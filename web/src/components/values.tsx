import type { ReactNode } from "react";
import { formatLocal, formatSeconds, formatUtc, secondsSince } from "@/format/moments";
import { formatBytes, formatCount, formatMoney } from "@/format/numbers";
import { Hint } from "./Hint";
import { useNow } from "./useNow";
import styles from "./values.module.css";

/** What stands where there is no value. */
export function Nothing({ why = "none" }: { why?: string }) {
  return (
    <span className="quiet">
      <span aria-hidden="true">–</span>
      <span className="visually-hidden">{why}</span>
    </span>
  );
}

/** A moment in the reader's time zone; UTC on hover and focus. */
export function Time({ at }: { at: string | null | undefined }) {
  if (at == null) return <Nothing />;
  return (
    <Hint text={formatUtc(at)}>
      {/* biome-ignore lint/a11y/noNoninteractiveTabindex: the hint with UTC is for the keyboard too. */}
      <time dateTime={at} tabIndex={0} className={styles.moment}>
        {formatLocal(at)}
      </time>
    </Hint>
  );
}

/** How long ago a moment was, kept up to date; the moment, local and in UTC, on hover and focus. */
export function Age({ since }: { since: string | null | undefined }) {
  const now = useNow();
  if (since == null) return <Nothing />;
  return (
    <Hint text={`${formatLocal(since)} (${formatUtc(since)})`}>
      {/* biome-ignore lint/a11y/noNoninteractiveTabindex: the hint with the moment is for the keyboard too. */}
      <time dateTime={since} tabIndex={0} className={styles.moment}>
        {formatSeconds(secondsSince(since, now))}
      </time>
    </Hint>
  );
}

/** Words with more to say on hover and focus. */
export function Explained({ by, children }: { by: ReactNode; children: ReactNode }) {
  return (
    <Hint text={by}>
      {/* biome-ignore lint/a11y/noNoninteractiveTabindex: the hint is for the keyboard too. */}
      <span tabIndex={0} className={styles.explained}>
        {children}
      </span>
    </Hint>
  );
}

export function Bytes({ count }: { count: number | null | undefined }) {
  if (count == null) return <Nothing />;
  return (
    <span className={styles.number} title={`${formatCount(count)} bytes`}>
      {formatBytes(count)}
    </span>
  );
}

/** `currency`: as the price list has it. */
export function Money({ amount, currency }: { amount: number | null | undefined; currency: string }) {
  if (amount == null) return <Nothing />;
  return <span className={styles.number}>{formatMoney(amount, currency)}</span>;
}

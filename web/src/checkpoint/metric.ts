import type { Schemas } from "@/api/client";

type MetricValue = Schemas["MetricValue"];

const NONFINITE = ["nan", "inf", "-inf"] as const;

/** Every digit that the API gives, or nan, inf and -inf. */
export function formatMetric(metric: MetricValue | undefined): string {
  if (metric === undefined) return "";
  if (metric.nonfinite != null) return metric.nonfinite;
  return metric.value == null ? "" : String(metric.value);
}

/** Throws an Error that says what to type. */
export function readMetric(text: string): MetricValue {
  const typed = text.trim().toLowerCase();
  const nonfinite = NONFINITE.find((each) => each === typed);
  if (nonfinite !== undefined) return { nonfinite };
  const value = typed === "" ? Number.NaN : Number(typed);
  if (!Number.isFinite(value)) throw new Error(`“${text}” is no number. Type one such as 0.25 or 1e-3, or nan.`);
  return { value };
}

/** The value as a number, for differences; null if it is none. */
export function numberOf(metric: MetricValue | undefined): number | null {
  return metric?.nonfinite == null ? (metric?.value ?? null) : null;
}

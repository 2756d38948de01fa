import { lazy, Suspense } from "react";
import { useQuery } from "@/api/client";
import { EmptyState, Loading, Reply } from "@/components/states";

/** The hours of a week: one page of the list. */
const HOURS = 168;
const ASKED_AGAIN_MS = 600_000;

// uPlot is a tenth of what Overview may load, and the lines stand below what needs somebody.
const TrendPlots = lazy(() => import("./TrendPlots"));

/** Goodput, bytes and cost of the last week, from the hourly samples. */
export function Trends({ project }: { project: string }) {
  const params = { params: { path: { project }, query: { limit: HOURS } } };
  const samples = useQuery("get", "/v1/projects/{project}/samples", params, { refetchInterval: ASKED_AGAIN_MS });
  return (
    <section aria-labelledby="trends">
      <h2 id="trends">The last week</h2>
      <Reply of={samples} what="the hourly samples">
        {({ items }) =>
          items.length === 0 ? (
            <EmptyState title="There is no sample yet">
              <p>The service takes one after the end of each hour.</p>
            </EmptyState>
          ) : (
            <Suspense fallback={<Loading what="the lines" />}>
              <TrendPlots samples={items} />
            </Suspense>
          )
        }
      </Reply>
    </section>
  );
}

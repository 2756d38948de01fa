import { Link } from "@tanstack/react-router";
import { useMemo } from "react";
import { type Schemas, useQuery } from "@/api/client";
import { TrendPanels } from "@/components/plot/TrendPanels";
import { goodputOf, hoursOf, missedHours, trendOf } from "@/components/plot/trends";
import { EmptyState, Reply } from "@/components/states";
import { formatSeconds } from "@/format/moments";
import { formatBytes, formatShare } from "@/format/numbers";

type RunSample = Schemas["RunSample"];

/** A week of a run that is always live: one page of the list. */
const HOURS = 168;
const ASKED_AGAIN_MS = 600_000;

/** Goodput, bytes and the age of the restore point in the last hours in which the run was live, from the samples. */
export function HourlySection({ project, run }: { project: string; run: string }) {
  const params = { params: { path: { project, run }, query: { limit: HOURS } } };
  const samples = useQuery("get", "/v1/projects/{project}/runs/{run}/samples", params, {
    refetchInterval: ASKED_AGAIN_MS,
  });
  return (
    <section aria-labelledby="hours">
      <h2 id="hours">Hour by hour</h2>
      <Reply of={samples} what="the hourly samples">
        {({ items }) =>
          items.length === 0 ? (
            <EmptyState title="There is no sample yet">
              <p>The service takes one of each live run after the end of each hour.</p>
            </EmptyState>
          ) : (
            <Trends samples={items} />
          )
        }
      </Reply>
      <p className="quiet">
        Other runs may use what this one stores, so no cost is sampled for it:{" "}
        <Link to="/retention" search={{ run }}>
          what it costs now
        </Link>
        .
      </p>
    </section>
  );
}

/** `samples`: at least one, the newest first. */
function Trends({ samples }: { samples: RunSample[] }) {
  const { x, trends } = useMemo(() => {
    const { x, samples: hours } = hoursOf(samples);
    const values = (of: (each: RunSample) => number | null) => hours.map((each) => each && of(each));
    const share = goodputOf(samples);
    const ages = samples.map((each) => each.restore_point_age_seconds).filter((age) => age !== null);
    return {
      x,
      trends: [
        trendOf({
          title: "Goodput by the hour",
          label: "Goodput",
          values: values((each) => each.goodput),
          format: formatShare,
          told: share === null ? "no step’s time is known" : `${formatShare(share)} of the time`,
        }),
        trendOf({
          title: "Bytes by the hour",
          label: "States in the trainer",
          values: values((each) => each.logical_bytes),
          format: formatBytes,
        }),
        trendOf({
          title: "Age of the restore point",
          label: "Age",
          values: values((each) => each.restore_point_age_seconds),
          format: formatSeconds,
          told: ages.length === 0 ? "there was none" : `${formatSeconds(Math.max(...ages))} at most`,
        }),
      ],
    };
  }, [samples]);
  return <TrendPanels x={x} trends={trends} missed={missedHours(samples)} />;
}

import { useMemo } from "react";
import type { Schemas } from "@/api/client";
import { TrendPanels } from "@/components/plot/TrendPanels";
import { goodputOf, hoursOf, missedHours, trendOf } from "@/components/plot/trends";
import { formatBytes, formatMoney, formatShare } from "@/format/numbers";

type ProjectSample = Schemas["ProjectSample"];

/** `samples`: at least one, the newest first. */
export default function TrendPlots({ samples }: { samples: ProjectSample[] }) {
  const { x, trends } = useMemo(() => {
    const { x, samples: hours } = hoursOf(samples);
    const currency = samples[0]?.currency ?? "";
    const values = (of: (each: ProjectSample) => number | null) => hours.map((each) => each && of(each));
    const share = goodputOf(samples);
    return {
      x,
      trends: [
        trendOf({
          title: "Goodput",
          label: "Goodput",
          values: values((each) => each.goodput),
          format: formatShare,
          told: share === null ? "nothing ran" : `${formatShare(share)} of the time`,
        }),
        trendOf({
          title: "Stored bytes",
          label: "Stored",
          values: values((each) => each.stored_bytes),
          format: formatBytes,
        }),
        // Prices may have changed their currency since: two in one line would not compare.
        trendOf({
          title: "Cost a month",
          label: "Per month",
          values: values((each) => (each.currency === currency ? each.per_month : null)),
          format: (value) => formatMoney(value, currency),
        }),
      ],
    };
  }, [samples]);
  return <TrendPanels x={x} trends={trends} missed={missedHours(samples)} />;
}

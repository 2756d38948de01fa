import { useQuery } from "@/api/client";
import { failureOf } from "@/api/problem";
import { Figure } from "@/components/facts/Figures";
import { Prices } from "@/components/facts/Prices";
import { Bytes, Money } from "@/components/values";
import { formatCount } from "@/format/numbers";
import { costAfter } from "./cost";
import type { PolicyDocument } from "./rules";

interface Of {
  project: string;
  /** undefined: all runs of the project. */
  run: string | undefined;
}

interface NowProps extends Of {
  /** undefined: not counted yet, or not at all. */
  freedByStore: Record<string, number> | undefined;
}

function useCost({ project, run }: Of) {
  const one = run !== undefined;
  const path = { project, run: run ?? "" };
  const ofProject = useQuery(
    "get",
    "/v1/projects/{project}/cost",
    { params: { path: { project } } },
    { enabled: !one },
  );
  const ofRun = useQuery("get", "/v1/projects/{project}/runs/{run}/cost", { params: { path } }, { enabled: one });
  return one ? ofRun : ofProject;
}

/** The prices of what `CostNow` tells. */
export function CostPrices(of: Of) {
  const { data } = useCost(of);
  return data === undefined ? null : <Prices cost={data} />;
}

/** What storing costs a month as it is, and once what expires is freed. Stands in a <dl>. */
export function CostNow({ project, run, freedByStore }: NowProps) {
  const ofProject = { params: { path: { project } } };
  const ofRun = { params: { path: { project, run: run ?? "" } } };
  const one = run !== undefined;
  const found = useCost({ project, run });
  const usages = [
    useQuery("get", "/v1/projects/{project}/usage", ofProject, { enabled: !one }),
    useQuery("get", "/v1/projects/{project}/runs/{run}/usage", ofRun, { enabled: one }),
  ];
  const cost = found.data;
  const usage = usages[one ? 1 : 0]?.data;
  const failed = [found, ...usages].find((each) => each.error);
  if (failed) return <Figure name="Cost a month">{failureOf(failed.error).detail}</Figure>;
  if (cost === undefined || usage === undefined) return <Figure name="Cost a month">…</Figure>;
  return (
    <>
      <Figure name="Cost a month now">
        <Money amount={cost.per_month} currency={cost.currency} />
        {cost.unpriced_bytes > 0 && <small className="quiet">some bytes have no price: holdfast prices sets one</small>}
      </Figure>
      <Figure name="Cost a month, once it is freed">
        {freedByStore === undefined ? (
          "…"
        ) : (
          <Money amount={costAfter(cost, usage, freedByStore)} currency={cost.currency} />
        )}
      </Figure>
    </>
  );
}

interface LaterProps {
  project: string;
  run: string;
  draft: PolicyDocument;
  /** Whether the draft differs from what is in force. */
  edited: boolean;
}

/** What the run comes to cost a month if it goes on saving as it has: under the policy in force, and under the draft. */
export function CostLater({ project, run, draft, edited }: LaterProps) {
  const path = { project, run };
  const how = { retry: false };
  const inForce = useQuery(
    "post",
    "/v1/projects/{project}/runs/{run}/cost/forecast",
    { params: { path }, body: {} },
    how,
  );
  const tried = useQuery(
    "post",
    "/v1/projects/{project}/runs/{run}/cost/forecast",
    { params: { path }, body: { retention: draft } },
    { ...how, enabled: edited },
  );
  const before = inForce.data;
  const after = tried.data;
  if (inForce.error) return <Figure name="Cost a month, later">{failureOf(inForce.error).detail}</Figure>;
  return (
    <>
      <Figure name="In the long run, under the policy in force">
        {before === undefined ? "…" : <Forecast forecast={before} />}
      </Figure>
      {edited && !tried.error && (
        <Figure name="In the long run, under this one">
          {after === undefined ? "…" : <Forecast forecast={after} />}
        </Figure>
      )}
    </>
  );
}

interface ForecastFigures {
  per_month: number;
  currency: string;
  kept_checkpoints: number;
  grows_per_month: number;
  unpriced_bytes: number;
  limits: string[];
}

function Forecast({ forecast }: { forecast: ForecastFigures }) {
  const { per_month, currency, kept_checkpoints, grows_per_month, unpriced_bytes, limits } = forecast;
  return (
    <span title={limits.join(" ")}>
      <Money amount={per_month} currency={currency} />
      <small className="quiet">
        {formatCount(kept_checkpoints)} kept
        {grows_per_month > 0 && (
          <>
            , and each month <Money amount={grows_per_month} currency={currency} /> more
          </>
        )}
        {unpriced_bytes > 0 && (
          <>
            , and <Bytes count={unpriced_bytes} /> without a price: holdfast prices sets one
          </>
        )}
      </small>
    </span>
  );
}

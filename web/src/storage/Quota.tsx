import { useQuery as useQueryOf } from "@tanstack/react-query";
import { api, type Schemas, useQuery } from "@/api/client";
import { isGone, isInvalid } from "@/api/problem";
import { Figure, Figures } from "@/components/facts/Figures";
import { ErrorState, Reply } from "@/components/states";
import { Bytes, Nothing } from "@/components/values";
import { formatSeconds } from "@/format/moments";
import { formatBytes, formatCount, formatShare } from "@/format/numbers";
import { plural } from "@/format/words";
import { quotaShare, secondsToQuota } from "./share_of_quota";

/** A forecast is one call a run: of more runs there is none. */
const MOST_TRAINING = 50;

interface Growth {
  /** Bytes a second that are added to the primary store. */
  bytesPerSecond: number;
  /** Runs with too few saves to tell anything. */
  tooNew: number;
  /** More train than were asked about. */
  isPart: boolean;
}

/** What the runs that train now add. Fails if a forecast of one of them fails: a part of them is no forecast. */
function useGrowth(project: string) {
  const params = { path: { project }, query: { status: ["training" as const], limit: MOST_TRAINING } };
  const runs = useQuery("get", "/v1/projects/{project}/runs", { params });
  const names = (runs.data?.items ?? []).map((each) => each.name);
  const isPart = runs.data?.next_cursor != null;
  const growth = useQueryOf({
    queryKey: ["growth", project, names, isPart],
    enabled: runs.data !== undefined,
    queryFn: async ({ signal }): Promise<Growth> => {
      let [bytesPerSecond, tooNew] = [0, 0];
      for (const run of names) {
        try {
          const { data } = await api.POST("/v1/projects/{project}/runs/{run}/cost/forecast", {
            params: { path: { project, run } },
            body: {},
            signal,
          });
          if (data) bytesPerSecond += data.bytes_per_save / data.save_interval_seconds;
        } catch (error) {
          if (isInvalid(error)) tooNew += 1;
          else if (!isGone(error)) throw error;
        }
      }
      return { bytesPerSecond, tooNew, isPart };
    },
  });
  return runs.data === undefined ? { data: undefined, error: runs.error, refetch: runs.refetch } : growth;
}

export function Quota({ project }: { project: string }) {
  const found = useQuery("get", "/v1/projects/{project}", { params: { path: { project } } });
  return (
    <Reply of={found} what="the quota">
      {({ stored_bytes, quota_bytes, quota_used_bytes, quotas }) => (
        <>
          <Figures>
            <Figure name="Stored, in all stores">
              <Bytes count={stored_bytes} />
            </Figure>
            <Figure name="Counts against the quota">
              <Bytes count={quota_used_bytes} />
            </Figure>
            <Figure name="Quota of the primary store">
              {quota_bytes === null
                ? "none"
                : `${formatBytes(quota_bytes)}, ${formatShare(quotaShare(quota_used_bytes, quota_bytes))} used`}
            </Figure>
            {(quotas ?? []).map((each) => (
              <OtherQuota key={each.kind} of={each} />
            ))}
          </Figures>
          <Forecast project={project} used={quota_used_bytes} quota={quota_bytes} />
        </>
      )}
    </Reply>
  );
}

/** What the figures above do not show: the quotas of objects, runs, checkpoints and rows, and the soft ones. */
function OtherQuota({ of: { kind, hard, soft, used } }: { of: Schemas["QuotaView"] }) {
  const format = kind === "bytes" ? formatBytes : formatCount;
  const limits = [
    ...(hard === null || kind === "bytes" ? [] : [`of ${format(hard)}`]),
    ...(soft === null ? [] : [`told from ${format(soft)} on`]),
  ];
  if (limits.length === 0) return null;
  return <Figure name={`Quota of ${kind}`}>{`${format(used)} used, ${limits.join(", ")}`}</Figure>;
}

function Forecast({ project, used, quota }: { project: string; used: number; quota: number | null }) {
  const growth = useGrowth(project);
  // What was known before is not shown beside a failure: it may be long ago.
  if (growth.error) {
    return (
      <>
        <p>There is no forecast now, because a call failed.</p>
        <ErrorState error={growth.error} onRetry={() => void growth.refetch()} />
      </>
    );
  }
  return (
    <Reply of={growth} what="the forecast">
      {({ bytesPerSecond, tooNew, isPart }) => {
        const left = secondsToQuota(used, quota, bytesPerSecond);
        return (
          <>
            <Figures>
              <Figure name="Added a day by the runs that train">
                {formatBytes(Math.round(bytesPerSecond * 86_400))}
              </Figure>
              <Figure name="Quota reached, if nothing expires, in">
                {left === null ? <Nothing why="not at this rate" /> : formatSeconds(left)}
              </Figure>
            </Figures>
            {tooNew > 0 && (
              <p className="quiet">Without {plural(tooNew, "run")} that saved too few times to tell anything.</p>
            )}
            {isPart && (
              <p className="quiet">Of the newest {MOST_TRAINING} runs that train: all of them together add more.</p>
            )}
          </>
        );
      }}
    </Reply>
  );
}

import { useQuery as useQueryOf } from "@tanstack/react-query";
import { useNavigate, useSearch } from "@tanstack/react-router";
import { useMemo, useState } from "react";
import { api, queryClient, type Schemas, usePages, useQuery } from "@/api/client";
import { useProject, useProjects } from "@/app/project";
import { Screen } from "@/app/Screen";
import { Can } from "@/components/Can";
import { allRows, type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState, ErrorState, Reply } from "@/components/states";
import { Age, Bytes, Nothing, Time } from "@/components/values";
import { formatSeconds } from "@/format/moments";
import { formatBytes, formatCount, formatShare } from "@/format/numbers";
import { Operations, Start } from "./LongWork";
import { secondsToQuota } from "./quota";
import styles from "./Storage.module.css";

/** Where the bytes are, and what proves that they can be read back. */
export function StorageScreen() {
  const project = useProject();
  const { run } = useSearch({ from: "/storage" });
  return (
    <Screen title="Storage" controls={project !== undefined && <RunPicker project={project} run={run} />}>
      <Part id="stores" title="Stores">
        <Stores />
      </Part>
      <Part id="scrub" title="Scrub">
        <Scrub project={project} run={run} />
      </Part>
      {project !== undefined && <OfProject project={project} run={run} />}
      <Part id="orphans" title="Orphans, and what waits for collection">
        <Orphans />
      </Part>
    </Screen>
  );
}

function OfProject({ project, run }: { project: string; run: string | undefined }) {
  return (
    <>
      <Part id="bad" title="Bad copies">
        <BadCopies project={project} />
      </Part>
      <Part id="second" title="Second store">
        <SecondStore project={project} />
      </Part>
      <Part id="drills" title="Drills">
        <Drills project={project} run={run} />
      </Part>
      {run !== undefined && (
        <Part id="tiers" title={`Tiers of ${run}`}>
          <Tiers project={project} run={run} />
        </Part>
      )}
      <Part id="quota" title="Quota">
        <Quota project={project} />
      </Part>
    </>
  );
}

function Part({ id, title, children }: { id: string; title: string; children: React.ReactNode }) {
  return (
    <section aria-labelledby={id}>
      <h2 id={id}>{title}</h2>
      {children}
    </section>
  );
}

function RunPicker({ project, run }: { project: string; run: string | undefined }) {
  const runs = useQuery("get", "/v1/projects/{project}/runs", { params: { path: { project }, query: { limit: 200 } } });
  const navigate = useNavigate({ from: "/storage" });
  const names = (runs.data?.items ?? []).map((each) => each.name);
  return (
    <label>
      Run of drills, scrubs and tiers{" "}
      <select
        value={run ?? ""}
        onChange={(event) =>
          void navigate({ search: (old) => ({ ...old, run: event.target.value || undefined }), resetScroll: false })
        }
      >
        <option value="">none chosen</option>
        {(run === undefined || names.includes(run) ? names : [run, ...names]).map((name) => (
          <option key={name}>{name}</option>
        ))}
      </select>
    </label>
  );
}

type Store = Schemas["StoreView"] & { clock: Schemas["StoreClock"] | undefined };
const store = createColumnHelper<Store>();
const STORES: Columns<Store> = [
  store.accessor("role", { header: "Store", size: 90 }),
  store.display({
    id: "answers",
    header: "State",
    size: 110,
    cell: ({ row: { original } }) => {
      const bad = original.problem ?? original.clock?.problem;
      return bad != null ? (
        <StateBadge state="unavailable" />
      ) : (
        <StateBadge state={original.claimed ? "answers" : "not claimed"} tone={original.claimed ? "good" : "warn"} />
      );
    },
  }),
  store.display({
    id: "what",
    header: "What is wrong",
    size: 260,
    cell: ({ row: { original } }) => {
      const text = [original.problem, original.clock?.problem, ...original.weaknesses].filter(Boolean).join(" ");
      return text === "" ? <Nothing why="nothing" /> : <span title={text}>{text}</span>;
    },
  }),
  store.accessor("kind", { header: "Kind", size: 80, meta: { phone: false } }),
  store.accessor("url", {
    header: "Where",
    size: 240,
    meta: { phone: false },
    cell: ({ getValue }) => <span title={getValue()}>{getValue()}</span>,
  }),
  store.accessor("probed_at", {
    header: "Tested, ago",
    size: 120,
    meta: { phone: false },
    cell: ({ getValue }) => <Age since={getValue()} />,
  }),
  store.accessor("checked_at", {
    header: "Compared, ago",
    size: 130,
    meta: { phone: false },
    cell: ({ getValue }) => <Age since={getValue()} />,
  }),
];

function Stores() {
  const stores = useQuery("get", "/v1/stores");
  const clocks = useQuery("get", "/v1/store-clocks");
  return (
    <Reply of={stores} what="the stores">
      {({ items }) => (
        <DataTable
          label="Stores"
          columns={STORES}
          pages={allRows(
            items.map((each) => ({ ...each, clock: clocks.data?.items.find((one) => one.role === each.role) })),
          )}
          rowKey={(row) => row.role}
          empty={null}
        />
      )}
    </Reply>
  );
}

function Figure({ name, children }: { name: string; children: React.ReactNode }) {
  return (
    <div>
      <dt className="quiet">{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

function Scrub({ project, run }: { project: string | undefined; run: string | undefined }) {
  const controllers = useQuery("get", "/v1/controllers", { params: { query: { limit: 100 } } });
  return (
    <>
      <Reply of={controllers} what="the scrub">
        {({ items }) => {
          const scrub = items.find((each) => each.name === "scrub");
          if (scrub === undefined) return <EmptyState title="This service does not scrub" />;
          return (
            <dl className={styles.figures}>
              <Figure name="Copies due to be read again">
                {scrub.due === null ? <Nothing why="unknown" /> : formatCount(scrub.due)}
              </Figure>
              <Figure name="The oldest is late by">
                {scrub.lag_seconds === null ? <Nothing why="unknown" /> : formatSeconds(scrub.lag_seconds)}
              </Figure>
              <Figure name="Last pass, ago">
                <Age since={scrub.last_pass_at} />
              </Figure>
              {scrub.paused_at !== null && <Figure name="Paused">{scrub.pause_reason ?? "yes"}</Figure>}
              {scrub.error !== null && <Figure name="Last error">{scrub.error}</Figure>}
            </dl>
          );
        }}
      </Reply>
      {project !== undefined && (
        <>
          <Start
            name="Scrub the run"
            run={run}
            title={`Read every copy of ${run}`}
            text="Each stored byte of the run’s checkpoints is read again and compared with its digest. What is bad is repaired from another copy, if there is one."
            start={(name) =>
              api.POST("/v1/projects/{project}/runs/{run}/scrubs", {
                params: { path: { project, run: name } },
                body: { mode: "read" },
              })
            }
          />
          <Operations project={project} kind="scrub" empty="No scrub was started by a person" />
        </>
      )}
    </>
  );
}

const bad = createColumnHelper<Schemas["BadCopy"]>();
const BAD: Columns<Schemas["BadCopy"]> = [
  bad.accessor("lost", {
    header: "State",
    size: 100,
    cell: ({ row: { original } }) => (
      <StateBadge
        state={original.lost ? "lost" : original.repaired_at !== null ? "repaired" : original.state}
        {...(original.repaired_at !== null && !original.lost ? { tone: "good" as const } : {})}
      />
    ),
  }),
  bad.accessor("digest", {
    header: "Chunk",
    size: 200,
    cell: ({ getValue }) => <code title={getValue()}>{getValue()}</code>,
  }),
  bad.accessor("store", { header: "Store", size: 90, meta: { phone: false } }),
  bad.accessor("finding", {
    header: "What was found",
    size: 240,
    cell: ({ getValue }) => <span title={getValue() ?? ""}>{getValue() ?? "–"}</span>,
  }),
  bad.accessor("checkpoints", { header: "Checkpoints", size: 110, meta: { align: "right", phone: false } }),
  bad.accessor("stored_bytes", {
    header: "Bytes",
    size: 95,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
  bad.accessor("bad_at", {
    header: "Found, ago",
    size: 120,
    meta: { phone: false },
    cell: ({ getValue }) => <Age since={getValue()} />,
  }),
];

function BadCopies({ project }: { project: string }) {
  const pages = usePages("/v1/projects/{project}/bad-copies", { path: { project }, query: { limit: 100 } });
  return (
    <DataTable
      label="Bad copies"
      columns={BAD}
      pages={pages}
      rowKey={(row) => `${row.digest} ${row.store} ${row.codec} ${row.storage_class}`}
      empty={
        <EmptyState title="No copy is known to be bad">
          <p>A scrub reads each copy again from time to time.</p>
        </EmptyState>
      }
    />
  );
}

const copies = createColumnHelper<Schemas["RunCopies"]>();
const COPIES: Columns<Schemas["RunCopies"]> = [
  copies.accessor("run", { header: "Run", size: 160 }),
  copies.display({
    id: "state",
    header: "State",
    size: 110,
    cell: ({ row: { original } }) => (
      <StateBadge
        state={!original.policy ? "no policy" : original.waiting > 0 ? "behind" : "whole"}
        tone={!original.policy ? "calm" : original.waiting > 0 ? "warn" : "good"}
      />
    ),
  }),
  copies.accessor("lag_seconds", {
    header: "Behind by",
    size: 120,
    meta: { align: "right" },
    cell: ({ getValue }) => formatSeconds(getValue()),
  }),
  copies.accessor("lag_steps", {
    header: "Steps",
    size: 90,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => formatCount(getValue()),
  }),
  copies.accessor("lag_bytes", {
    header: "To copy",
    size: 100,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
  copies.accessor("copied_step", {
    header: "Newest there",
    size: 120,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => (getValue() == null ? <Nothing /> : formatCount(getValue())),
  }),
  copies.accessor("error", {
    header: "Last error",
    size: 220,
    meta: { phone: false },
    cell: ({ getValue }) => <span title={getValue() ?? ""}>{getValue() ?? "–"}</span>,
  }),
];

function SecondStore({ project }: { project: string }) {
  const pages = usePages("/v1/projects/{project}/copies", { path: { project }, query: { limit: 100 } });
  if (pages.items.length > 0 && pages.items.every((each) => each.store === null)) {
    return (
      <EmptyState title="The service has no second store">
        <p>Set HOLDFAST_SECOND_STORE, and put a policy of copies: holdfast policies put.</p>
      </EmptyState>
    );
  }
  return (
    <DataTable
      label="Copies in the second store"
      columns={COPIES}
      pages={pages}
      rowKey={(row) => row.run}
      empty={<EmptyState title="No run is here yet" />}
    />
  );
}

function Drills({ project, run }: { project: string; run: string | undefined }) {
  const stores = useQuery("get", "/v1/stores");
  const [chosen, setChosen] = useState<Schemas["StoreRole"]>("primary");
  return (
    <>
      <label>
        From the store alone{" "}
        <select value={chosen} onChange={(event) => setChosen(event.target.value as Schemas["StoreRole"])}>
          {(stores.data?.items ?? []).map((each) => (
            <option key={each.role}>{each.role}</option>
          ))}
        </select>
      </label>
      <Start
        name="Start a drill"
        run={run}
        title={`Restore the newest of ${run} from the ${chosen} store`}
        text="Every byte is read from this store alone and checked, as a restore would. It takes as long as a restore does: that is the time to compare with your objective."
        start={(name) =>
          api.POST("/v1/projects/{project}/runs/{run}/drills", {
            params: { path: { project, run: name } },
            body: { selector: "latest", store: chosen },
          })
        }
      />
      <Operations project={project} kind="drill" empty="No drill was made yet" />
    </>
  );
}

const tier = createColumnHelper<Schemas["TierPlanRow"]>();
const TIERS: Columns<Schemas["TierPlanRow"]> = [
  tier.accessor("step", { header: "Step", size: 90, meta: { align: "right" } }),
  tier.accessor("tier", { header: "Tier", size: 90, cell: ({ getValue }) => <StateBadge state={getValue()} /> }),
  tier.accessor("target", { header: "Moves to", size: 120, cell: ({ getValue }) => getValue() ?? <Nothing /> }),
  tier.accessor("moves_at", {
    header: "When",
    size: 215,
    meta: { phone: false },
    cell: ({ getValue }) => <Time at={getValue()} />,
  }),
  tier.accessor("moves_bytes", {
    header: "Bytes",
    size: 100,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
  tier.accessor("stays", {
    header: "Why it stays hot",
    size: 260,
    cell: ({ getValue }) => <span title={getValue() ?? ""}>{getValue() ?? "–"}</span>,
  }),
];

function Tiers({ project, run }: { project: string; run: string }) {
  const plan = useQuery("get", "/v1/projects/{project}/runs/{run}/tiers/plan", { params: { path: { project, run } } });
  return (
    <Reply of={plan} what="the tiers">
      {({ rows, policy_level }) => (
        <>
          {policy_level === null && <p className="quiet">There is no policy of tiers: all stay hot.</p>}
          <DataTable
            label="Checkpoints and their tiers"
            columns={TIERS}
            pages={allRows(rows)}
            rowKey={(row) => row.checkpoint_id}
            empty={<EmptyState title="No checkpoint yet" />}
          />
        </>
      )}
    </Reply>
  );
}

const MOST_TRAINING = 50;

/** Bytes a second that the runs which train now add. A run with fewer than two saves tells nothing yet. */
function useGrowth(project: string) {
  const runs = useQuery("get", "/v1/projects/{project}/runs", {
    params: { path: { project }, query: { status: ["training"], limit: MOST_TRAINING } },
  });
  const names = (runs.data?.items ?? []).map((each) => each.name);
  return useQueryOf({
    queryKey: ["growth", project, names],
    enabled: runs.data !== undefined,
    queryFn: async ({ signal }) => {
      let growth = 0;
      for (const run of names) {
        try {
          const { data } = await api.POST("/v1/projects/{project}/runs/{run}/cost/forecast", {
            params: { path: { project, run } },
            body: {},
            signal,
          });
          if (data) growth += data.bytes_per_save / data.save_interval_seconds;
        } catch (error) {
          if (signal.aborted) throw error;
        }
      }
      return growth;
    },
  });
}

function Quota({ project }: { project: string }) {
  const projects = useProjects();
  const growth = useGrowth(project);
  const found = projects.data?.items.find((each) => each.name === project);
  if (found === undefined)
    return (
      <Reply of={projects} what="the quota">
        {() => <Nothing />}
      </Reply>
    );
  const rate = growth.data ?? 0;
  const left = secondsToQuota(found.stored_bytes, found.quota_bytes, rate);
  return (
    <dl className={styles.figures}>
      <Figure name="Stored">
        <Bytes count={found.stored_bytes} />
      </Figure>
      <Figure name="Quota">
        {found.quota_bytes === null ? (
          "none"
        ) : (
          <>
            {formatBytes(found.quota_bytes)},{" "}
            {formatShare(found.quota_bytes === 0 ? 1 : found.stored_bytes / found.quota_bytes)} used
          </>
        )}
      </Figure>
      <Figure name="Added a day by the runs that train">
        {growth.isLoading ? "…" : formatBytes(Math.round(rate * 86_400))}
      </Figure>
      <Figure name="Reached, if nothing expires, in">
        {left === null ? <Nothing why="not at this rate" /> : formatSeconds(left)}
      </Figure>
    </dl>
  );
}

function Orphans() {
  const sweeps = useQuery("get", "/v1/sweeps");
  const plan = useQuery("get", "/v1/collections/plan");
  const [error, setError] = useState<unknown>(null);
  const [started, setStarted] = useState("");

  async function sweep() {
    setError(null);
    try {
      const { data } = await api.POST("/v1/sweeps", { params: {}, body: { dry_run: true, force: false } });
      setStarted(`The sweep ${data?.id ?? ""} only looks; its figures come here when it is done.`);
      void queryClient.invalidateQueries();
    } catch (failure) {
      setError(failure);
    }
  }

  const rows = useMemo(() => sweeps.data?.stores ?? [], [sweeps.data]);
  return (
    <>
      <Reply of={sweeps} what="the sweeps">
        {({ problems }) => (
          <>
            {(problems ?? []).map((each) => (
              <p key={each} role="alert">
                {each}
              </p>
            ))}
            {rows.map((each) => (
              <dl key={each.store} className={styles.figures}>
                <Figure name={`Swept (${each.store}), ago`}>
                  <Age since={each.swept_at} />
                </Figure>
                <Figure name="Orphans due">
                  {formatCount(each.due_orphans)}, {formatBytes(each.due_bytes)}
                </Figure>
                <Figure name="Deleted">
                  {formatCount(each.deleted)}, {formatBytes(each.deleted_bytes)}
                </Figure>
                {each.stopped !== null && <Figure name="Stopped">{each.stopped}</Figure>}
              </dl>
            ))}
          </>
        )}
      </Reply>
      <Reply of={plan} what="the collection">
        {({ stores }) => (
          <ul>
            {stores.map((each) => (
              <li key={each.store}>
                {each.store}: {formatCount(each.copies)} copies ({formatBytes(each.bytes)}) would be deleted now
                {each.problem !== null && `; not yet: ${each.problem}`}
                {each.waiting.map((wait) => `; ${formatBytes(wait.bytes)} wait for a ${wait.waits_for}`).join("")}
              </li>
            ))}
          </ul>
        )}
      </Reply>
      <Can scope="operate">
        <button type="button" onClick={() => void sweep()}>
          Look for orphans
        </button>
      </Can>
      {started !== "" && <p role="status">{started}</p>}
      {error !== null && <ErrorState error={error} />}
    </>
  );
}

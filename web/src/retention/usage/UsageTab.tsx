import { useQuery as useQueryOf } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { useMemo } from "react";
import { api, type Schemas, useQuery } from "@/api/client";
import { useSession } from "@/api/session";
import { allRows, type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { Figure, Figures } from "@/components/facts/Figures";
import { Prices } from "@/components/facts/Prices";
import { Reply } from "@/components/states";
import { Bytes, Money, Nothing, Time } from "@/components/values";
import { eachOf } from "../actions";
import { RunsUsage } from "./RunsUsage";

/** What a project or a run takes up and costs: by store, by run, and by project for those who see all. */
export function UsageTab({ project, run }: { project: string; run: string | undefined }) {
  const { project: own } = useSession();
  return (
    <>
      <section aria-labelledby="usage">
        <h2 id="usage">{run === undefined ? `Project ${project}` : `Run ${run}`}</h2>
        <Usage project={project} run={run} />
      </section>
      {run === undefined && (
        <section aria-labelledby="by-run">
          <h2 id="by-run">By run, the dearest first</h2>
          <RunsUsage project={project} />
        </section>
      )}
      {run === undefined && own === null && (
        <section aria-labelledby="by-project">
          <h2 id="by-project">By project</h2>
          <Projects />
        </section>
      )}
    </>
  );
}

function Usage({ project, run }: { project: string; run: string | undefined }) {
  const usage = useQueryOf({
    queryKey: ["get", "/v1/projects/{project}/usage", { params: { path: { project, run } } }, "with its cost"],
    queryFn: async ({ signal }) => {
      const ofRun = { params: { path: { project, run: run ?? "" } }, signal };
      const ofProject = { params: { path: { project } }, signal };
      const [bytes, cost] = await Promise.all(
        run === undefined
          ? [api.GET("/v1/projects/{project}/usage", ofProject), api.GET("/v1/projects/{project}/cost", ofProject)]
          : [
              api.GET("/v1/projects/{project}/runs/{run}/usage", ofRun),
              api.GET("/v1/projects/{project}/runs/{run}/cost", ofRun),
            ],
      );
      return { bytes: bytes.data as Schemas["UsageView"], cost: cost.data as Schemas["CostView"] };
    },
  });
  return (
    <Reply of={usage} what="usage and cost">
      {({ bytes, cost }) => (
        <>
          <Figures>
            <Figure name="Cost a month, as stored now">
              <Money amount={cost.per_month} currency={cost.currency} />
            </Figure>
            <Figure name="Stored, all copies">
              <Bytes count={bytes.stored_bytes} />
              {bytes.run !== null && <small className="quiet">other runs may need some of it, too</small>}
            </Figure>
            <Figure name="Committed checkpoints need">
              <Bytes count={bytes.committed_bytes} />
            </Figure>
            <Figure name="Only the trash needs">
              <Bytes count={bytes.trashed_bytes} />
            </Figure>
            <Figure name="Pending collection">
              <Bytes count={bytes.pending_collection_bytes} />
            </Figure>
            <Figure name="Arriving">
              <Bytes count={bytes.arriving_bytes} />
            </Figure>
            <Figure name="Held, and pinned">
              <Bytes count={bytes.held_bytes} />, <Bytes count={bytes.pinned_bytes} />
            </Figure>
            <Figure name="States in the trainer">
              <Bytes count={bytes.logical_bytes} />
            </Figure>
            <Figure name="Not sent, deduplicated">
              <Bytes count={bytes.deduplicated_bytes} />
            </Figure>
            {cost.unpriced_bytes > 0 && (
              <Figure name="Without a price">
                <Bytes count={cost.unpriced_bytes} />
                <small className="quiet">not in the cost: holdfast prices sets one</small>
              </Figure>
            )}
          </Figures>
          <ByStore lines={cost.lines} currency={cost.currency} />
          <Prices cost={cost} />
          <p className="quiet">
            {bytes.counted_until != null ? (
              <>
                What bytes are kept for is counted until <Time at={bytes.counted_until} />.
              </>
            ) : (
              "The catalog was upgraded: what bytes are kept for is still being counted."
            )}
          </p>
        </>
      )}
    </Reply>
  );
}

const line = createColumnHelper<Schemas["CostLine"]>();

function ByStore({ lines, currency }: { lines: Schemas["CostLine"][]; currency: string }) {
  const pages = useMemo(() => allRows(lines), [lines]);
  const columns = useMemo<Columns<Schemas["CostLine"]>>(
    () => [
      line.accessor("store", {
        header: "Store",
        size: 110,
        cell: ({ getValue }) => getValue() ?? "no longer attached",
      }),
      line.accessor("store_kind", { header: "Kind", size: 80, meta: { phone: false } }),
      line.accessor("storage_class", {
        header: "Storage class",
        size: 120,
        meta: { phone: false },
        cell: ({ getValue }) => getValue() ?? "the default",
      }),
      line.accessor("stored_bytes", {
        header: "Stored",
        size: 100,
        meta: { align: "right" },
        cell: ({ getValue }) => <Bytes count={getValue()} />,
      }),
      line.accessor("per_gib_month", {
        header: "A GiB and month",
        size: 130,
        meta: { align: "right", phone: false },
        cell: ({ getValue }) => (getValue() == null ? <Nothing why="no price" /> : `${getValue()} ${currency}`),
      }),
      line.accessor("per_month", {
        header: "A month",
        size: 100,
        meta: { align: "right" },
        cell: ({ getValue }) => <Money amount={getValue()} currency={currency} />,
      }),
    ],
    [currency],
  );
  if (lines.length === 0) return null;
  return (
    <DataTable
      label="Bytes and costs by store"
      columns={columns}
      pages={pages}
      rowKey={(row) => `${row.store} ${row.store_kind} ${row.storage_class}`}
      empty={null}
    />
  );
}

interface ProjectRow {
  usage: Schemas["UsageView"];
  cost: Schemas["CostView"];
}

/** Each project's figures are counted anew with each call: more than this are asked for by the API. */
const MOST_PROJECTS = 100;

const each = createColumnHelper<ProjectRow>();
const PROJECTS: Columns<ProjectRow> = [
  each.accessor("usage.project", {
    header: "Project",
    size: 180,
    cell: ({ getValue }) => (
      <Link from="/retention" to="/retention" search={(old) => ({ ...old, project: getValue() })}>
        {getValue()}
      </Link>
    ),
  }),
  each.accessor("cost.per_month", {
    header: "A month",
    size: 110,
    meta: { align: "right" },
    cell: ({ row: { original } }) => <Money amount={original.cost.per_month} currency={original.cost.currency} />,
  }),
  each.accessor("usage.stored_bytes", {
    header: "Stored",
    size: 100,
    meta: { align: "right" },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
  each.accessor("usage.trashed_bytes", {
    header: "In the trash",
    size: 110,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
  each.accessor("usage.logical_bytes", {
    header: "States",
    size: 100,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
];

function Projects() {
  const found = useQuery("get", "/v1/usage", { params: { query: { limit: MOST_PROJECTS } } });
  return (
    <Reply of={found} what="the projects">
      {({ items, next_cursor }) => (
        <>
          <ProjectCosts usages={items} />
          {next_cursor != null && <p className="quiet">The first {MOST_PROJECTS} by name; holdfast usage lists all.</p>}
        </>
      )}
    </Reply>
  );
}

function ProjectCosts({ usages }: { usages: Schemas["UsageView"][] }) {
  const names = usages.map((usage) => usage.project);
  const costs = useQueryOf({
    queryKey: ["get", "/v1/projects/{project}/cost", { names }],
    queryFn: ({ signal }) =>
      eachOf(names, async (project) => {
        const { data } = await api.GET("/v1/projects/{project}/cost", { params: { path: { project } }, signal });
        return data as Schemas["CostView"];
      }),
    staleTime: 60_000,
  });
  return (
    <Reply of={costs} what="the costs of the projects">
      {(found) => <ProjectTable usages={usages} costs={found} />}
    </Reply>
  );
}

function ProjectTable({ usages, costs }: { usages: Schemas["UsageView"][]; costs: Schemas["CostView"][] }) {
  const pages = useMemo(() => {
    const rows = usages.flatMap((usage, index) => {
      const cost = costs[index];
      return cost === undefined ? [] : [{ usage, cost }];
    });
    return allRows(rows.sort((one, other) => other.cost.per_month - one.cost.per_month));
  }, [usages, costs]);
  return (
    <DataTable
      label="Projects and their costs"
      columns={PROJECTS}
      pages={pages}
      rowKey={(row) => row.usage.project}
      empty={null}
    />
  );
}

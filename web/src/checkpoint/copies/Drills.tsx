import { useNavigate } from "@tanstack/react-router";
import { useState } from "react";
import { api, type Schemas, useQuery } from "@/api/client";
import { Can } from "@/components/Can";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { Section } from "@/components/facts/Facts";
import { StateBadge } from "@/components/StateBadge";
import { Reply } from "@/components/states";
import { Bytes, Time } from "@/components/values";
import { newKey } from "@/format/keys";
import { formatSeconds } from "@/format/moments";
import { formatCount, plural } from "@/format/numbers";
import styles from "../checkpoint.module.css";
import { useChanged } from "../edit/changes";
import { nameOf } from "../selector";

type CheckpointView = Schemas["CheckpointView"];
/** Of the protocol's DrillResult, which the API does not type: an operation's result may be of any kind. */
interface DrillResult {
  bytes: number;
  chunks: number;
  tensors: number;
  seconds: number;
  newest_step: number;
  rpo_seconds: number;
  rpo_steps: number;
}

type OperationView = Schemas["OperationView"];

const SHOWN = 20;
const LOOK_AGAIN_MS = 3000;

function isUnderWay({ state }: OperationView): boolean {
  return state === "queued" || state === "running";
}

/** Restores of this very checkpoint from one store alone, each byte verified: what came of them, and a new one. */
export function Drills({ checkpoint }: { checkpoint: CheckpointView }) {
  const { id, project, run } = checkpoint;
  const drills = useQuery(
    "get",
    "/v1/operations",
    { params: { query: { project, run, kind: "drill", checkpoint_id: id, limit: SHOWN } } },
    { refetchInterval: ({ state: { data } }) => (data?.items.some(isUnderWay) ? LOOK_AGAIN_MS : false) },
  );
  const aside = <DrillButton checkpoint={checkpoint}>Start a drill</DrillButton>;
  return (
    <Section id="drills" title="Drills" aside={aside}>
      <Reply of={drills} what="the drills">
        {({ items }) =>
          items.length === 0 ? (
            <p className="quiet">No drill has restored it yet. A drill proves that it can be restored.</p>
          ) : (
            <ul className={`panel ${styles.list}`} aria-label="Drills of this checkpoint">
              {items.map((each) => (
                <li key={each.id}>
                  <Drill drill={each} />
                </li>
              ))}
            </ul>
          )
        }
      </Reply>
    </Section>
  );
}

/** Asks for the store, and shows the drill where its result will stand. */
export function DrillButton({ checkpoint, children }: { checkpoint: CheckpointView; children: string }) {
  const [isAsking, setAsking] = useState(false);
  const why = checkpoint.state === "committed" ? undefined : "It is in the trash. Take it back first.";
  return (
    <>
      <Can scope="operate" reason={why}>
        <button type="button" onClick={() => setAsking(true)}>
          {children}
        </button>
      </Can>
      {isAsking && <StartDrill checkpoint={checkpoint} onClose={() => setAsking(false)} />}
    </>
  );
}

function Drill({ drill }: { drill: OperationView }) {
  const result = drill.result as DrillResult | null;
  return (
    <>
      <StateBadge state={drill.state} /> from the {String(drill.arguments.store)} store alone,{" "}
      <Time at={drill.created_at} />
      {isUnderWay(drill) && <span className="quiet"> {drill.progress.note ?? "waits for a worker"}</span>}
      {drill.error !== null && <>: {drill.error}</>}
      {result !== null && (
        <>
          : restored in {formatSeconds(result.seconds)} (RTO), <Bytes count={result.bytes} /> in{" "}
          {plural(result.chunks, "chunk")} and {plural(result.tensors, "tensor")}, each byte verified.{" "}
          {result.rpo_steps === 0 && result.rpo_seconds === 0
            ? "It was the newest committed checkpoint."
            : `It was ${formatSeconds(result.rpo_seconds)} and ${plural(result.rpo_steps, "step")} behind step ${formatCount(result.newest_step)}, the newest (RPO).`}
        </>
      )}
    </>
  );
}

function StartDrill({ checkpoint, onClose }: { checkpoint: CheckpointView; onClose: () => void }) {
  const { id, project, run } = checkpoint;
  // The list of stores is not for a project's token; their clocks are for every caller.
  const stores = useQuery("get", "/v1/store-clocks");
  const [store, setStore] = useState<Schemas["StoreRole"]>("primary");
  // The same with each try, until something else is asked for.
  const [key, setKey] = useState(newKey);
  const changed = useChanged();
  const navigate = useNavigate();

  async function start() {
    await api.POST("/v1/projects/{project}/runs/{run}/drills", {
      params: { path: { project, run }, header: { "idempotency-key": key } },
      body: { selector: id, store },
    });
    await changed();
    await navigate({ to: "/checkpoints/$id", params: { id }, search: { part: "copies" }, hash: "drills" });
  }

  return (
    <ConfirmDialog title={`Drill ${nameOf(checkpoint)}`} action="Start the drill" onConfirm={start} onClose={onClose}>
      <p>
        The service reads <Bytes count={checkpoint.chunk_bytes} /> from this store alone, and verifies every byte as a
        restore would. It takes as long as a restore does: that is the time to compare with your objective.
      </p>
      <p>
        <label htmlFor="drill-store">The only store that is read</label>
        <br />
        <select
          id="drill-store"
          value={store}
          onChange={(event) => {
            setStore(event.target.value as Schemas["StoreRole"]);
            setKey(newKey());
          }}
        >
          {(stores.data?.items ?? [{ role: store }]).map((each) => (
            <option key={each.role}>{each.role}</option>
          ))}
        </select>
      </p>
    </ConfirmDialog>
  );
}

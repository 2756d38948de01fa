import { Link, useParams, useSearch } from "@tanstack/react-router";
import { type Schemas, useQuery } from "@/api/client";
import { Screen } from "@/app/Screen";
import { StateBadge } from "@/components/StateBadge";
import { Reply } from "@/components/states";
import { askedAgain } from "@/live/refresh";
import { RunName } from "@/runs/RunName";
import styles from "./checkpoint.module.css";
import { CopiesPart } from "./copies/CopiesPart";
import { DrillButton } from "./copies/Drills";
import { HealthBadge } from "./HealthBadge";
import { HistoryPart } from "./history/HistoryPart";
import { PARTS, type Part } from "./route";
import { SummaryPart } from "./SummaryPart";
import { nameOf } from "./selector";
import { TensorsPart } from "./tensors/TensorsPart";

type CheckpointView = Schemas["CheckpointView"];

/** Everything that is known of one checkpoint, and what a person can do with it. */
export function CheckpointScreen() {
  const { id } = useParams({ from: "/checkpoints/$id" });
  const found = useQuery("get", "/v1/checkpoints/{checkpoint_id}", { params: { path: { checkpoint_id: id } } });
  const whole = useWhole(found.data);
  // Of another checkpoint nothing stays: a dry run that was shown proves nothing for this one.
  if (whole !== undefined) return <Loaded checkpoint={whole} key={whole.id} />;
  return (
    <Screen
      title="Checkpoint"
      above={[
        <Link key="all" to="/checkpoints">
          Checkpoints
        </Link>,
      ]}
    >
      <Reply of={found} what={id}>
        {() => null}
      </Reply>
    </Screen>
  );
}

/** With the fields that the service counts for one that is selected alone, and not for one that is read by its id. */
function useWhole(checkpoint: CheckpointView | undefined): CheckpointView | undefined {
  const { id = "", project = "", run = "" } = checkpoint ?? {};
  const selected = useQuery(
    "get",
    "/v1/projects/{project}/runs/{run}/checkpoints/{selector}",
    { params: { path: { project, run, selector: id } } },
    // No event tells that its chunks are proven by now.
    {
      enabled: checkpoint !== undefined,
      refetchInterval: ({ state: { data } }) => askedAgain(data?.unproven ?? false),
    },
  );
  if (checkpoint === undefined) return undefined;
  const { stored_bytes = null, unproven = null } = selected.data ?? {};
  return { ...checkpoint, stored_bytes, unproven };
}

function Loaded({ checkpoint }: { checkpoint: CheckpointView }) {
  const { part = "summary" } = useSearch({ from: "/checkpoints/$id" });
  return (
    <Screen
      title={nameOf(checkpoint)}
      above={[
        <Link key="all" to="/checkpoints">
          Checkpoints
        </Link>,
        <RunName key="run" project={checkpoint.project} run={checkpoint.run} />,
      ]}
      controls={
        <span className="row">
          <StateBadge state={checkpoint.state} />
          {checkpoint.state !== "uploading" && <HealthBadge health={checkpoint.health} />}
          <Link to="/checkpoints/$id/compare" params={{ id: checkpoint.id }}>
            Compare
          </Link>
          {["committed", "trashed"].includes(checkpoint.state) && (
            <DrillButton checkpoint={checkpoint}>Drill</DrillButton>
          )}
        </span>
      }
    >
      <nav aria-label="Parts of the checkpoint" className={styles.parts}>
        {PARTS.map((each) => (
          <Link
            key={each}
            to="/checkpoints/$id"
            params={{ id: checkpoint.id }}
            search={{ part: each === "summary" ? undefined : each }}
            activeOptions={{ exact: true }}
            activeProps={{}}
            aria-current={each === part ? "page" : undefined}
          >
            {WORDS[each]}
          </Link>
        ))}
      </nav>
      <PartOf part={part} checkpoint={checkpoint} />
    </Screen>
  );
}

const WORDS: Record<Part, string> = {
  summary: "Summary",
  tensors: "Tensors and shards",
  copies: "Copies",
  history: "History",
};

function PartOf({ part, checkpoint }: { part: Part; checkpoint: CheckpointView }) {
  switch (part) {
    case "summary":
      return <SummaryPart checkpoint={checkpoint} />;
    case "tensors":
      return <TensorsPart checkpoint={checkpoint} />;
    case "copies":
      return <CopiesPart checkpoint={checkpoint} />;
    case "history":
      return <HistoryPart checkpoint={checkpoint} />;
  }
}

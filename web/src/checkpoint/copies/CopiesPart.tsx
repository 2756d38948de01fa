import { useQuery as useFound } from "@tanstack/react-query";
import { useState } from "react";
import { api, type Schemas, useQuery } from "@/api/client";
import { Can } from "@/components/Can";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { CheckpointName } from "@/components/facts/CheckpointName";
import { Fact, Facts, Section } from "@/components/facts/Facts";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState, ErrorState, Reply } from "@/components/states";
import { Bytes, Nothing, Time } from "@/components/values";
import { newKey } from "@/format/keys";
import { formatSeconds } from "@/format/moments";
import { formatCount } from "@/format/numbers";
import { askedAgain } from "@/live/refresh";
import styles from "../checkpoint.module.css";
import { useChanged } from "../edit/changes";
import { type CopyGroup, isUnderWay, readCopies } from "./copies";
import { Drills } from "./Drills";

type CheckpointView = Schemas["CheckpointView"];
type Impact = Schemas["Impact"];
type ThawView = Schemas["ThawView"];

/** Where its bytes are, how that was proven, and what is bad. */
export function CopiesPart({ checkpoint }: { checkpoint: CheckpointView }) {
  if (checkpoint.state !== "committed" && checkpoint.state !== "trashed") {
    return (
      <EmptyState title="It has no copies to show">
        <p>It is {checkpoint.state}. Copies are shown while a checkpoint is committed or in the trash.</p>
      </EmptyState>
    );
  }
  return (
    <>
      <Where checkpoint={checkpoint} />
      <ByStore checkpoint={checkpoint} />
      <Drills checkpoint={checkpoint} />
      <BadCopies checkpoint={checkpoint} />
      <Thaw checkpoint={checkpoint} />
    </>
  );
}

function Where({ checkpoint }: { checkpoint: CheckpointView }) {
  const { project, run } = checkpoint;
  const second = useQuery(
    "get",
    "/v1/projects/{project}/runs/{run}/copies",
    { params: { path: { project, run } } },
    { refetchInterval: ({ state: { data } }) => askedAgain(data !== undefined && data.waiting > 0) },
  );
  return (
    <Section id="where" title="Where it is">
      <Facts>
        <Fact name="Tier">
          <StateBadge state={checkpoint.tier} />
        </Fact>
        <Fact name="Proof">
          {checkpoint.unproven == null ? (
            <Nothing why="unknown" />
          ) : checkpoint.unproven ? (
            <StateBadge state="unproven" />
          ) : (
            "each chunk has a copy that the store or the service hashed"
          )}
        </Fact>
        <Fact name="Its chunks">
          <Bytes count={checkpoint.chunk_bytes} />
        </Fact>
        <Fact name="Stored">
          <Bytes count={checkpoint.stored_bytes} />
        </Fact>
        <Fact name="Second store, of the run" wide>
          <Reply of={second} what="the second store">
            {(found) => <SecondStore found={found} />}
          </Reply>
        </Fact>
      </Facts>
    </Section>
  );
}

function SecondStore({ found }: { found: Schemas["RunCopies"] }) {
  if (found.store === null) return <span className="quiet">The service has none.</span>;
  if (!found.policy) return <span className="quiet">No policy asks for copies of this run.</span>;
  return (
    <>
      {found.copied_step === null
        ? "No checkpoint is whole there"
        : `The newest that is whole there is step ${formatCount(found.copied_step)}`}
      , {formatCount(found.waiting)} waiting
      {found.error !== null && `. The last try failed: ${found.error}`}
    </>
  );
}

const FIRST_CHUNKS = 20;
/** Each chunk is a call of its own: of many chunks the copies are asked for again less often. */
const APART_PER_CHUNK_MS = 100;

const PROOFS: Record<Schemas["Proof"], string> = {
  store_sha256: "the store hashed it",
  read: "the service read it back",
  read_early: "the service read it before the store settled it",
  unproven: "only the client hashed it",
};

function ByStore({ checkpoint }: { checkpoint: CheckpointView }) {
  const { id, project } = checkpoint;
  const [most, setMost] = useState(FIRST_CHUNKS);
  const changed = useChanged();
  // The Idempotency-Key of the scrub that is asked about.
  const [asked, setAsked] = useState<string | null>(null);
  const [started, setStarted] = useState<string | null>(null);
  const manifest = useQuery("get", "/v1/checkpoints/{checkpoint_id}/manifest", {
    params: { path: { checkpoint_id: id } },
  });
  const shards = manifest.data?.shards;
  const copies = useFound({
    queryKey: ["get", "copies of a checkpoint", id, most],
    queryFn: ({ signal }) => readCopies({ id, project }, shards ?? [], most, signal),
    enabled: shards !== undefined,
    placeholderData: (before) => before,
    refetchInterval: ({ state: { data } }) =>
      Math.max(askedAgain(data?.groups.some(isUnderWay) ?? false), (data?.chunks ?? 0) * APART_PER_CHUNK_MS),
  });

  async function scrub(key: string) {
    const { data } = await api.POST("/v1/checkpoints/{checkpoint_id}/scrubs", {
      params: { path: { checkpoint_id: id }, header: { "idempotency-key": key } },
      body: { mode: "read" },
    });
    setStarted(data?.id ?? null);
    await changed();
  }

  const aside = (
    <Can scope="operate">
      <button type="button" onClick={() => setAsked(newKey())}>
        Read every copy again
      </button>
    </Can>
  );
  return (
    <Section id="by-store" title="Copies by store" aside={aside}>
      {started !== null && (
        <p role="status">
          The scrub runs as operation <code>{started}</code>; what it finds stands here when it has ended.
        </p>
      )}
      {manifest.error ? (
        <ErrorState error={manifest.error} onRetry={() => void manifest.refetch()} />
      ) : (
        <Reply of={copies} what="the copies">
          {({ groups, chunks, isWhole }) => (
            <>
              <GroupTable groups={groups} />
              <p className="quiet" role="status">
                {isWhole ? `All ${formatCount(chunks)} chunks.` : `The first ${formatCount(chunks)} chunks.`} A chunk
                that other checkpoints share is stored once.
              </p>
              {!isWhole && (
                <button type="button" onClick={() => setMost(most * 5)} disabled={copies.isFetching}>
                  {copies.isFetching ? "Reading…" : `Read those of the first ${formatCount(most * 5)}`}
                </button>
              )}
            </>
          )}
        </Reply>
      )}
      {asked !== null && (
        <ConfirmDialog
          title="Read every copy again"
          action="Start the scrub"
          onConfirm={() => scrub(asked)}
          onClose={() => setAsked(null)}
        >
          <p>
            The service reads <Bytes count={checkpoint.stored_bytes ?? checkpoint.chunk_bytes} /> of each store that has
            it, and hashes them. A bad copy is replaced by a good one, if there is one.
          </p>
        </ConfirmDialog>
      )}
    </Section>
  );
}

function GroupTable({ groups }: { groups: CopyGroup[] }) {
  if (groups.length === 0) return <EmptyState title="No store has a copy" />;
  return (
    <div className={styles.wideTable}>
      <table className={styles.table}>
        <thead>
          <tr>
            <th scope="col">Store</th>
            <th scope="col">State</th>
            <th scope="col">Proof</th>
            <th scope="col">Last proven</th>
            <th scope="col">Class</th>
            <th scope="col">Codec</th>
            <th scope="col" className={styles.right}>
              Copies
            </th>
            <th scope="col" className={styles.right}>
              Stored
            </th>
          </tr>
        </thead>
        <tbody>
          {groups.map((each) => (
            <tr key={[each.store, each.storageClass, each.state, each.proof, each.codec].join("/")}>
              <th scope="row">{each.store}</th>
              <td>
                <StateBadge state={each.state} {...(each.state === "verified" ? { tone: "good" as const } : {})} />
              </td>
              <td>{each.proof === null ? <Nothing /> : PROOFS[each.proof]}</td>
              <td>{each.verifiedAt === null ? <Nothing why="never" /> : <Time at={each.verifiedAt} />}</td>
              <td>{each.storageClass ?? <Nothing />}</td>
              <td>{each.codec}</td>
              <td className={styles.right}>{formatCount(each.copies)}</td>
              <td className={styles.right}>
                <Bytes count={each.storedBytes} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function BadCopies({ checkpoint }: { checkpoint: CheckpointView }) {
  const impact = useQuery(
    "get",
    "/v1/checkpoints/{checkpoint_id}/impact",
    { params: { path: { checkpoint_id: checkpoint.id } } },
    { refetchInterval: ({ state: { data } }) => askedAgain(data !== undefined && data.chunks.length > 0) },
  );
  return (
    <Section id="bad" title="Bad copies, and whom they concern">
      <Reply of={impact} what="the bad copies">
        {(found) => <BadOnes impact={found} own={checkpoint.id} />}
      </Reply>
    </Section>
  );
}

function BadOnes({ impact, own }: { impact: Impact; own: string }) {
  if (impact.chunks.length === 0) return <p className="quiet">No copy of its chunks is bad or suspect.</p>;
  const mine = impact.checkpoints.find((each) => each.checkpoint_id === own);
  const bad = impact.chunks.length + impact.chunks_left_off;
  return (
    <>
      <p>
        {formatCount(bad)} {bad === 1 ? "chunk has" : "chunks have"} a bad copy;{" "}
        {impact.lost ? "a chunk is lost: no attached store has a good one." : "each has a good one in another place."}
        {mine?.good_before != null && (
          <>
            {" "}
            The nearest earlier good step is{" "}
            <CheckpointName id={mine.good_before.checkpoint_id}>{formatCount(mine.good_before.step)}</CheckpointName>.
          </>
        )}
      </p>
      <ul className={`panel ${styles.list}`}>
        {impact.chunks.map((chunk) => (
          <li key={`${chunk.project} ${chunk.digest}`}>
            <StateBadge state={chunk.lost ? "lost" : "bad"} tone={chunk.lost ? "bad" : "warn"} />{" "}
            <code className={styles.digest}>{chunk.digest}</code> <Bytes count={chunk.bytes} />
            <ul>
              {chunk.copies.map((copy) => (
                <li key={`${copy.store} ${copy.state} ${copy.bad_at} ${copy.codec} ${copy.finding}`}>
                  {copy.store ?? "a store that is not attached"}: {copy.state}
                  {copy.finding !== null && `, ${copy.finding}`}
                  {copy.bad_at !== null && (
                    <>
                      {" "}
                      since <Time at={copy.bad_at} />
                    </>
                  )}
                </li>
              ))}
            </ul>
          </li>
        ))}
        {impact.chunks_left_off > 0 && <li>and {formatCount(impact.chunks_left_off)} more</li>}
      </ul>
      <p>
        {impact.chunks_left_off > 0 ? "Those that are shown concern" : "They concern"}{" "}
        {formatCount(impact.checkpoints.length + impact.left_off)} checkpoints in {formatCount(impact.runs.length)}{" "}
        runs:{" "}
        {impact.checkpoints.slice(0, 20).map((each, index) => (
          <span key={each.checkpoint_id}>
            {index > 0 && ", "}
            <CheckpointName id={each.checkpoint_id}>
              {each.run} step {formatCount(each.step)}
            </CheckpointName>
          </span>
        ))}
        {impact.checkpoints.length + impact.left_off > 20 && " and more"}.
      </p>
    </>
  );
}

/** Only of what is not hot: whether it can be read, and how to make it so. */
function Thaw({ checkpoint }: { checkpoint: CheckpointView }) {
  const thaw = useQuery(
    "get",
    "/v1/checkpoints/{checkpoint_id}/thaw",
    { params: { path: { checkpoint_id: checkpoint.id } } },
    {
      enabled: checkpoint.tier !== "hot",
      refetchInterval: ({ state: { data } }) => askedAgain(data?.state === "thawing"),
    },
  );
  if (checkpoint.tier === "hot") return null;
  return (
    <Section id="thaw" title="Thaw">
      <Reply of={thaw} what="the thaw">
        {(found) => <OneThaw thaw={found} />}
      </Reply>
    </Section>
  );
}

function OneThaw({ thaw }: { thaw: ThawView }) {
  const [isAsking, setAsking] = useState(false);
  const [days, setDays] = useState("3");
  const [speed, setSpeed] = useState<Schemas["ThawSpeed"]>("standard");
  const changed = useChanged();
  const speeds = Object.keys(thaw.takes_seconds) as Schemas["ThawSpeed"][];

  async function start() {
    await api.POST("/v1/checkpoints/{checkpoint_id}/thaw", {
      params: { path: { checkpoint_id: thaw.checkpoint_id } },
      body: { days: Number(days), speed },
    });
    await changed();
  }

  return (
    <>
      <Facts>
        <Fact name="State">
          <StateBadge state={thaw.state} />
        </Fact>
        <Fact name="Chunks that can be read">
          {formatCount(thaw.readable_chunks)} of {formatCount(thaw.chunks)}
        </Fact>
        <Fact name="Cold">
          <Bytes count={thaw.cold_bytes} />
        </Fact>
        <Fact name="Expected">
          <Time at={thaw.expected_at} />
        </Fact>
        <Fact name="Readable until">
          <Time at={thaw.readable_until} />
        </Fact>
      </Facts>
      <p>
        <Can scope="operate" reason={speeds.length === 0 ? "It needs no thaw." : undefined}>
          <button type="button" onClick={() => setAsking(true)}>
            Thaw it
          </button>
        </Can>
      </p>
      {isAsking && (
        <ConfirmDialog title="Thaw it" action="Thaw" onConfirm={start} onClose={() => setAsking(false)}>
          <p>
            <label htmlFor="speed">How fast</label>
            <br />
            <select id="speed" value={speed} onChange={(event) => setSpeed(event.target.value as Schemas["ThawSpeed"])}>
              {speeds.map((each) => (
                <option key={each} value={each}>
                  {each}: within {formatSeconds(thaw.takes_seconds[each] ?? 0)}
                  {thaw.costs_dollars[each] === undefined ? "" : `, about ${thaw.costs_dollars[each].toFixed(2)} USD`}
                </option>
              ))}
            </select>
          </p>
          <p>
            <label htmlFor="thaw-days">Days that it can be read</label>
            <br />
            <input
              id="thaw-days"
              type="number"
              min={1}
              required
              value={days}
              onChange={(event) => setDays(event.target.value)}
            />
          </p>
        </ConfirmDialog>
      )}
    </>
  );
}

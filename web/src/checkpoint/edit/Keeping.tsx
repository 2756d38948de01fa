import { useState } from "react";
import { api, type Schemas, usePages } from "@/api/client";
import { Can } from "@/components/Can";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { Section } from "@/components/facts/Facts";
import { StateBadge } from "@/components/StateBadge";
import { ErrorState } from "@/components/states";
import { Time } from "@/components/values";
import { newKey } from "@/format/keys";
import styles from "../checkpoint.module.css";
import { Reason } from "./actions";
import { useChanged } from "./changes";
import { EditDialog } from "./EditDialog";

type CheckpointView = Schemas["CheckpointView"];
type HoldView = Schemas["HoldView"];

type Asking = { what: "pin" } | { what: "unpin" } | { what: "hold" } | { what: "release"; hold: HoldView };

/** What keeps it: a pin, and holds that are or were. */
export function Keeping({ checkpoint }: { checkpoint: CheckpointView }) {
  const [asking, setAsking] = useState<Asking | null>(null);
  const holds = usePages("/v1/checkpoints/{checkpoint_id}/holds", {
    path: { checkpoint_id: checkpoint.id },
    query: { over: true, limit: 100 },
  });
  const isPinned = checkpoint.pinned_at != null;
  const trashed = checkpoint.state === "trashed" ? "It is in the trash. Take it back first." : undefined;
  const close = () => setAsking(null);
  const aside = (
    <span className="row">
      <Can scope="operate" reason={trashed}>
        <button type="button" onClick={() => setAsking({ what: isPinned ? "unpin" : "pin" })}>
          {isPinned ? "Unpin" : "Pin"}
        </button>
      </Can>
      <Can scope="operate">
        <button type="button" onClick={() => setAsking({ what: "hold" })}>
          Hold
        </button>
      </Can>
    </span>
  );
  return (
    <Section id="keeping" title="Pin and holds" aside={aside}>
      <ul className={`panel ${styles.list}`}>
        <li>
          {isPinned ? (
            <>
              <StateBadge state="pinned" tone="calm" /> by {checkpoint.pinned_by}: {checkpoint.pin_reason}{" "}
              <span className="quiet">
                {checkpoint.pinned_until == null ? "until it is unpinned" : "until "}
                {checkpoint.pinned_until != null && <Time at={checkpoint.pinned_until} />}
              </span>
            </>
          ) : (
            <span className="quiet">Not pinned: a policy may expire it, and a person may delete it.</span>
          )}
        </li>
        {holds.items.map((hold) => (
          <li key={hold.id}>
            <Hold hold={hold} onRelease={() => setAsking({ what: "release", hold })} />
          </li>
        ))}
        {holds.items.length === 0 && !holds.isPending && !holds.error && (
          <li className="quiet">No hold was ever placed on it.</li>
        )}
        {holds.hasMore && (
          <li>
            <button type="button" onClick={holds.loadMore}>
              More holds
            </button>
          </li>
        )}
      </ul>
      {holds.error ? <ErrorState error={holds.error} onRetry={holds.retry} /> : null}
      {asking?.what === "pin" && <Pin checkpoint={checkpoint} onClose={close} />}
      {asking?.what === "unpin" && <Unpin checkpoint={checkpoint} onClose={close} />}
      {asking?.what === "hold" && <PlaceHold checkpoint={checkpoint} onClose={close} />}
      {asking?.what === "release" && <Release hold={asking.hold} onClose={close} />}
    </Section>
  );
}

function Hold({ hold, onRelease }: { hold: HoldView; onRelease: () => void }) {
  return (
    <>
      <StateBadge state={hold.in_force ? "held" : "over"} tone={hold.in_force ? "warn" : "calm"} />{" "}
      {hold.kind === "legal" ? "until it is released" : "until "}
      {hold.retain_until !== null && <Time at={hold.retain_until} />}, by {hold.placed_by}: {hold.reason}
      {hold.mirror && (
        <span className="quiet">
          {" "}
          {hold.mirror_error ??
            (hold.mirrored_at === null ? "Object Lock: not on every copy yet." : "Locked by Object Lock.")}
        </span>
      )}{" "}
      {hold.released_at !== null ? (
        <span className="quiet">
          Released by {hold.released_by}, <Time at={hold.released_at} />: {hold.release_reason}
        </span>
      ) : (
        hold.in_force &&
        hold.kind === "legal" && (
          <Can scope="admin">
            <button type="button" onClick={onRelease} aria-label={`Release the hold: ${hold.reason}`}>
              Release
            </button>
          </Can>
        )
      )}
    </>
  );
}

const DAY_SECONDS = 86_400;

function Pin({ checkpoint, onClose }: { checkpoint: CheckpointView; onClose: () => void }) {
  const [reason, setReason] = useState("");
  const [days, setDays] = useState("");

  async function pin(seen: CheckpointView) {
    await api.PUT("/v1/checkpoints/{checkpoint_id}/pin", {
      params: { path: { checkpoint_id: seen.id }, header: { "if-match": seen.etag } },
      body: { reason: reason.trim(), expires_in_seconds: days === "" ? null : Number(days) * DAY_SECONDS },
    });
  }

  return (
    <EditDialog title="Pin it" action="Pin" checkpoint={checkpoint} onEdit={pin} onClose={onClose}>
      <p>No policy expires it and no person deletes it, until somebody unpins it.</p>
      <Reason value={reason} onChange={setReason} help="Shown to people who find it kept." />
      <p>
        <label htmlFor="days">For so many days; empty: until it is unpinned</label>
        <br />
        <input id="days" type="number" min={1} value={days} onChange={(event) => setDays(event.target.value)} />
      </p>
    </EditDialog>
  );
}

function Unpin({ checkpoint, onClose }: { checkpoint: CheckpointView; onClose: () => void }) {
  async function unpin(seen: CheckpointView) {
    await api.DELETE("/v1/checkpoints/{checkpoint_id}/pin", {
      params: { path: { checkpoint_id: seen.id }, header: { "if-match": seen.etag } },
    });
  }

  return (
    <EditDialog title="Unpin it" action="Unpin" checkpoint={checkpoint} onEdit={unpin} onClose={onClose}>
      <p>
        {checkpoint.pinned_by} pinned it: {checkpoint.pin_reason}. From now on its retention policy decides.
      </p>
    </EditDialog>
  );
}

function PlaceHold({ checkpoint, onClose }: { checkpoint: CheckpointView; onClose: () => void }) {
  const [reason, setReason] = useState("");
  const [until, setUntil] = useState("");
  const [mirror, setMirror] = useState(false);
  // One for this dialog: a second click, or a retry after a lost reply, places no second hold.
  const [key] = useState(newKey);
  const changed = useChanged();

  async function place() {
    await api.POST("/v1/checkpoints/{checkpoint_id}/holds", {
      params: { path: { checkpoint_id: checkpoint.id }, header: { "idempotency-key": key } },
      body: { reason: reason.trim(), retain_until: until === "" ? null : new Date(until).toISOString(), mirror },
    });
    await changed();
  }

  return (
    <ConfirmDialog title="Hold it" action="Place the hold" onConfirm={place} onClose={onClose}>
      <p>
        No policy and no person deletes it. A hold ends at its date, or, without one, when another token with the scope
        “admin” releases it. It can be made longer and never shorter.
      </p>
      <Reason value={reason} onChange={setReason} help="Shown to people whose deletion it refuses." />
      <p>
        <label htmlFor="until">Until, in your time; empty: until it is released</label>
        <br />
        <input id="until" type="datetime-local" value={until} onChange={(event) => setUntil(event.target.value)} />
      </p>
      <p>
        <label>
          <input type="checkbox" checked={mirror} onChange={(event) => setMirror(event.target.checked)} /> Also by the
          store's Object Lock (S3)
        </label>
      </p>
    </ConfirmDialog>
  );
}

function Release({ hold, onClose }: { hold: HoldView; onClose: () => void }) {
  const [reason, setReason] = useState("");
  const changed = useChanged();

  async function release() {
    await api.POST("/v1/holds/{hold_id}/release", {
      params: { path: { hold_id: hold.id } },
      body: { reason: reason.trim() },
    });
    await changed();
  }

  return (
    <ConfirmDialog title="Release the hold" action="Release" onConfirm={release} onClose={onClose}>
      <p>
        {hold.placed_by} placed it: {hold.reason}. Without it, policies and persons may delete the checkpoint.
      </p>
      <Reason value={reason} onChange={setReason} help="It stays in the history." />
    </ConfirmDialog>
  );
}

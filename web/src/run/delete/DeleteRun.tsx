import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { api, type Schemas } from "@/api/client";
import { ProblemError } from "@/api/problem";
import { Can } from "@/components/Can";
import { ConfirmDialog, type Conflict } from "@/components/ConfirmDialog";
import { Dialog } from "@/components/dialog/Dialog";
import { CheckpointName } from "@/components/facts/CheckpointName";
import { Section } from "@/components/facts/Facts";
import { ErrorState, Loading } from "@/components/states";
import { changesOf } from "@/format/changes";
import { formatBytes, plural } from "@/format/numbers";
import styles from "../RunScreen.module.css";

type Deletion = Schemas["Deletion"];

const PATH = "/v1/projects/{project}/runs/{run}";

interface DeleteRunProps {
  project: string;
  run: string;
  onDeleted: (inTrash: Schemas["InTrash"]) => void;
}

/** The whole run goes to the trash, as a dry run has shown it, by its name. */
export function DeleteRun(props: DeleteRunProps) {
  const [isAsking, setAsking] = useState(false);
  return (
    <Section id="delete" title="Delete">
      <Can scope="operate">
        <button type="button" className="danger" onClick={() => setAsking(true)}>
          Delete run
        </button>
      </Can>
      {isAsking && <Asking {...props} onClose={() => setAsking(false)} />}
    </Section>
  );
}

function Asking({ project, run, onDeleted, onClose }: DeleteRunProps & { onClose: () => void }) {
  const queries = useQueryClient();
  const [reason, setReason] = useState("");
  const path = { project, run };
  const title = `Delete ${run}?`;
  const queryKey = ["dry-run", PATH, path];
  // A dry run changes nothing: it is asked as a read is. It is asked once: what an event or another tab has changed since
  // is not what was seen, and the service refuses it by the `etag`.
  const plan = useQuery({ queryKey, queryFn: ({ signal }) => dryRun(signal), gcTime: 0, staleTime: "static" });

  async function dryRun(signal?: AbortSignal): Promise<Deletion> {
    const body = { dry_run: true, reason: "" };
    const { data } = await api.DELETE(PATH, { params: { path }, body, ...(signal ? { signal } : {}) });
    return data as Deletion;
  }

  async function remove(seen: Deletion) {
    const { data } = await api.DELETE(PATH, {
      params: { path, header: { "if-match": seen.etag } },
      body: { dry_run: false, reason: reason.trim() },
    });
    // What this screen has of the run is not asked for again: the service knows the run no more.
    void queries.invalidateQueries({ refetchType: "none" });
    const { in_trash } = data as Deletion;
    if (in_trash !== null) onDeleted(in_trash);
  }

  async function conflict(seen: Deletion): Promise<Conflict> {
    const now = await dryRun();
    return { changes: changesOf(shownOf(seen), shownOf(now)), reload: () => queries.setQueryData(queryKey, now) };
  }

  const seen = plan.data;
  if (seen === undefined) {
    return (
      <Dialog title={title} onClose={onClose}>
        {plan.error ? (
          <Refused error={plan.error} onRetry={() => void plan.refetch()} />
        ) : (
          <Loading what="what would go" />
        )}
        <p>
          <button type="button" onClick={onClose}>
            Cancel
          </button>
        </p>
      </Dialog>
    );
  }
  return (
    <ConfirmDialog
      title={title}
      action="Delete the run"
      typed={run}
      onConfirm={() => remove(seen)}
      onConflict={() => conflict(seen)}
      onClose={onClose}
    >
      <WhatGoes seen={seen} />
      <p>
        <label htmlFor="why">Why (for readers of the audit events)</label>
        <br />
        <input
          id="why"
          className={styles.wide}
          maxLength={1000}
          value={reason}
          onChange={(event) => setReason(event.target.value)}
        />
      </p>
    </ConfirmDialog>
  );
}

/** Of a dry run, what the dialog shows. */
function shownOf({ checkpoints, logical_bytes, freed }: Deletion): Record<string, unknown> {
  return { checkpoints, bytes_of_states: logical_bytes, bytes_freed: freed.bytes };
}

function WhatGoes({ seen }: { seen: Deletion }) {
  const { checkpoints, logical_bytes, freed } = seen;
  const stores = Object.entries(freed.by_store ?? {});
  return (
    <>
      <p>
        {plural(checkpoints, "checkpoint")} {checkpoints === 1 ? "goes" : "go"} to the trash with the run:{" "}
        {formatBytes(logical_bytes)} of states. The run leaves every list and takes no job, and its name is not free
        until it is purged. Until then it can be taken back.
      </p>
      <p>
        The collection after the purge frees {formatBytes(freed.bytes)}, net of what other runs share
        {stores.length > 0 && `: ${stores.map(([url, bytes]) => `${formatBytes(bytes)} in ${url}`).join(", ")}`}.
      </p>
    </>
  );
}

interface Kept {
  checkpoint_id: string;
  step: number;
  attempt: number;
  reasons: Schemas["Reason"][];
}

/** Why the run may not go: the checkpoints that must stay, each a link to where a person can change that, or what else
 * the service says. */
function Refused({ error, onRetry }: { error: unknown; onRetry: () => void }) {
  const context = error instanceof ProblemError ? error.problem.context : undefined;
  const kept = context?.checkpoints as Kept[] | undefined;
  if (kept === undefined) return <ErrorState error={error} onRetry={onRetry} />;
  const more = Number(context?.count) - kept.length;
  return (
    <div role="alert">
      <p>The run cannot be deleted, because this must stay:</p>
      <ul>
        {kept.map((each) => (
          <li key={each.checkpoint_id}>
            <CheckpointName id={each.checkpoint_id}>
              step {each.step} of attempt {each.attempt}
            </CheckpointName>
            : {each.reasons.map((reason) => reason.detail).join("; ")}
          </li>
        ))}
        {more > 0 && <li>and {plural(more, "other")}</li>}
      </ul>
      <p>Release the holds, take the pins away, or wait for those who read. Then look again.</p>
      <button type="button" onClick={onRetry}>
        Look again
      </button>
    </div>
  );
}

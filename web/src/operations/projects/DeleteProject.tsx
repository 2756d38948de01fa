import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { api, type Schemas } from "@/api/client";
import { ConfirmDialog, type Conflict } from "@/components/ConfirmDialog";
import { Reply } from "@/components/states";
import { changesOf } from "@/format/changes";
import { formatLocal } from "@/format/moments";
import { formatBytes } from "@/format/numbers";
import { refresh } from "@/live/refresh";
import styles from "../Operations.module.css";
import { Details } from "../parts";

type ProjectView = Schemas["ProjectView"];
type Deletion = Schemas["Deletion"];

const PATH = "/v1/projects/{project}";

/** Asks the service first whether it may go: a project whose runs are there is refused, and the refusal says what to do. */
export function DeleteProject({ of, onClose }: { of: ProjectView; onClose: () => void }) {
  const queries = useQueryClient();
  const [shown, setShown] = useState(of);
  const [reason, setReason] = useState("");
  const path = { project: of.name };
  const queryKey = ["dry-run", PATH, of.name];
  // A dry run changes nothing: it is asked as a read is, and once, because what has changed since was not seen.
  const plan = useQuery({ queryKey, queryFn: ({ signal }) => dryRun(signal), gcTime: 0, staleTime: "static" });

  async function dryRun(signal?: AbortSignal): Promise<Deletion> {
    const body = { dry_run: true, reason: "" };
    const { data } = await api.DELETE(PATH, { params: { path }, body, ...(signal ? { signal } : {}) });
    return data as Deletion;
  }

  async function remove(seen: Deletion) {
    await api.DELETE(PATH, {
      params: { path, header: { "if-match": seen.etag } },
      body: { dry_run: false, reason: reason.trim() },
    });
    void refresh("/v1/projects");
  }

  /** The name is another project's now. */
  async function conflict(): Promise<Conflict> {
    const [seen, { data: now }] = await Promise.all([dryRun(), api.GET(PATH, { params: { path } })]);
    if (now === undefined) throw new Error("The service gave no project.");
    const reload = () => {
      queries.setQueryData(queryKey, seen);
      setShown(now);
    };
    return { changes: changesOf(factsOf(shown), factsOf(now)), reload };
  }

  if (plan.data === undefined) {
    return (
      <Details title={`Delete ${of.name}?`} close="Cancel" onClose={onClose}>
        <Reply of={plan} what="whether it may go">
          {() => null}
        </Reply>
      </Details>
    );
  }
  const seen = plan.data;
  return (
    <ConfirmDialog
      title={`Delete ${of.name}?`}
      action="Delete the project"
      typed={of.name}
      onConfirm={() => remove(seen)}
      onConflict={conflict}
      onClose={onClose}
    >
      <p>
        It has no run that is not deleted. It goes to the trash with {formatBytes(shown.stored_bytes)}, and can be taken
        back until it is purged.
      </p>
      <div className={styles.fields}>
        <label className={styles.field}>
          Reason, for readers of the audit events
          <input maxLength={500} value={reason} onChange={(event) => setReason(event.target.value)} />
        </label>
      </div>
    </ConfirmDialog>
  );
}

/** What tells one project of a name from the next. */
function factsOf({ created_at, stored_bytes }: ProjectView): Record<string, unknown> {
  return { made: formatLocal(created_at), stored: formatBytes(stored_bytes) };
}

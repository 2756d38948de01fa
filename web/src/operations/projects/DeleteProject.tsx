import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { api, type Schemas } from "@/api/client";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { Reply } from "@/components/states";
import { formatBytes } from "@/format/numbers";
import { refresh } from "@/live/refresh";
import styles from "../Operations.module.css";
import { Details } from "../parts";

/** Asks the service first whether it may go: a project whose runs are there is refused, and the refusal says what to do. */
export function DeleteProject({ of, onClose }: { of: Schemas["ProjectView"]; onClose: () => void }) {
  const [reason, setReason] = useState("");
  const path = { project: of.name };
  // A dry run changes nothing: it is asked as a read is.
  const plan = useQuery({
    queryKey: ["dry-run", "/v1/projects/{project}", of.name],
    queryFn: async ({ signal }) => {
      const { data } = await api.DELETE("/v1/projects/{project}", {
        params: { path },
        body: { dry_run: true, reason: "" },
        signal,
      });
      return data as Schemas["Deletion"];
    },
    gcTime: 0,
    staleTime: Number.POSITIVE_INFINITY,
  });

  async function remove(seen: Schemas["Deletion"]) {
    await api.DELETE("/v1/projects/{project}", {
      params: { path, header: { "if-match": seen.etag } },
      body: { dry_run: false, reason: reason.trim() },
    });
    void refresh("/v1/projects");
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
      onClose={onClose}
    >
      <p>
        It has no run that is not deleted. It goes to the trash with {formatBytes(of.stored_bytes)}, and can be taken
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

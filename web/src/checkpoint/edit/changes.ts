import { useQueryClient } from "@tanstack/react-query";
import { api, type Schemas } from "@/api/client";

/** What only reads: plans and dry runs are posts. */
const READS = ["get", "post"];

/** After a call that wrote: asks again for what the screen shows, and forgets the rest. */
export function useChanged(): () => Promise<void> {
  const queries = useQueryClient();
  return () => queries.invalidateQueries({ predicate: ({ queryKey }) => READS.includes(String(queryKey[0])) });
}

/** Edits this version: if somebody was faster, the service says so. */
export async function editCheckpoint(seen: Schemas["CheckpointView"], body: Schemas["EditCheckpoint"]): Promise<void> {
  await api.PATCH("/v1/checkpoints/{checkpoint_id}", {
    params: { path: { checkpoint_id: seen.id }, header: { "if-match": seen.etag } },
    body,
  });
}

/** Why labels, health and metrics cannot be changed now; undefined: they can be. */
export function whyNotEditable(checkpoint: Schemas["CheckpointView"]): string | undefined {
  if (checkpoint.state === "committed") return undefined;
  return checkpoint.state === "trashed"
    ? "It is in the trash. Take it back first."
    : `It is ${checkpoint.state}, and only a committed checkpoint can be changed.`;
}

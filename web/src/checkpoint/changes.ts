import { useQueryClient } from "@tanstack/react-query";
import type { Schemas } from "@/api/client";

/** After a call that wrote: asks again for what the screen shows, and forgets the rest. */
export function useChanged(): () => Promise<void> {
  const queries = useQueryClient();
  return () => queries.invalidateQueries({ predicate: ({ queryKey }) => queryKey[0] === "get" });
}

/** Why labels, health and metrics cannot be changed now; undefined: they can be. */
export function whyNotEditable(checkpoint: Schemas["CheckpointView"]): string | undefined {
  if (checkpoint.state === "committed") return undefined;
  return checkpoint.state === "trashed"
    ? "It is in the trash. Take it back first."
    : `It is ${checkpoint.state}, and only a committed checkpoint can be changed.`;
}

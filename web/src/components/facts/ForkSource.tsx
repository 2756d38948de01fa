import { type Schemas, useQuery } from "@/api/client";
import { isGone } from "@/api/problem";
import { CheckpointName } from "./CheckpointName";

/** From which checkpoint of another run a fork was made: a link while that one is there, and words for ever. */
export function ForkSource({ source }: { source: Schemas["ForkedFrom"] }) {
  const id = source.checkpoint_id;
  const found = useQuery("get", "/v1/checkpoints/{checkpoint_id}", { params: { path: { checkpoint_id: id } } });
  const name = `${source.project}/${source.run}@${source.step}#${source.attempt}`;
  if (found.data === undefined)
    return (
      <span title={id}>
        {name}
        {isGone(found.error) && ", which is gone"}
      </span>
    );
  const { state } = found.data;
  return (
    <CheckpointName id={id} project={source.project}>
      {name}
      {state === "committed" ? "" : `, ${state}`}
    </CheckpointName>
  );
}

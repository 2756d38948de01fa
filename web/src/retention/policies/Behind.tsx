import type { Schemas } from "@/api/client";
import { Changes } from "@/components/facts/Changes";
import { changesOf } from "@/format/changes";
import type { Draft } from "./editing";

/** Why an edit cannot be saved that is behind what holds now. */
export const BEHIND = "The policy was changed after this edit was begun. Look above at what the edit would change now.";

/** That another person has changed the policy under an edit, and what the edit would change of it now. */
export function Behind({ of: draft, found }: { of: Draft; found: Schemas["PolicyView"] | null }) {
  if (!draft.isBehind) return null;
  return (
    <div role="status" className="panel">
      <p>
        {found === null
          ? "The policy was deleted after this edit was begun."
          : `${found.updated_by} changed the policy after this edit was begun.`}{" "}
        Saved now, the edit would change:
      </p>
      <Changes of={changesOf(found?.document ?? {}, draft.document)} />
      <button type="button" onClick={() => draft.rebase(found)}>
        Go on from what holds now
      </button>
    </div>
  );
}

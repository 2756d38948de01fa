import { useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import type { Schemas } from "@/api/client";
import type { Conflict } from "@/components/ConfirmDialog";
import { changesOf } from "@/format/changes";
import type { Level } from "../actions";
import { type PolicyDocument, sameRules } from "../rules";
import { policyQuery, useChangeSearch, useRetentionSearch } from "../useRetention";

type PolicyView = Schemas["PolicyView"];

export interface Draft {
  /** Of the fields: with a new one they begin anew. */
  edition: number;
  /** What the fields show: the edit, else what is in force. */
  document: PolicyDocument;
  edited: boolean;
  /** What held when the edit began: the version that was seen. */
  base: PolicyView | null;
  /** Goes on with the edit from what holds now, which the reader has seen. */
  rebase: () => void;
  edit: (document: PolicyDocument) => void;
  discard: () => void;
  /** Ends the edit: the service has it. What was typed since is an edit of its own. */
  saved: (document: PolicyDocument) => void;
}

/** The edit of a policy, which is in the address until it is saved. `found`: what holds now. */
export function useDraft(found: PolicyView | null): Draft {
  const { draft } = useRetentionSearch();
  const change = useChangeSearch();
  // A new key gives the editor's fields anew: somebody else's edit is shown, unless it would take the reader's away.
  const [edition, setEdition] = useState(0);
  const [etag, setEtag] = useState(found?.etag);
  if (found?.etag !== etag) {
    setEtag(found?.etag);
    if (draft === undefined) setEdition(edition + 1);
  }
  // The address follows a moment later: fields that were made before it would have the edit again.
  const [isDiscarded, setDiscarded] = useState(false);
  if (isDiscarded && draft === undefined) {
    setDiscarded(false);
    setEdition(edition + 1);
  }
  const inForce: PolicyDocument = found?.document ?? {};
  const edited = draft !== undefined && !sameRules(draft, inForce);
  // An edit has whole documents: saved over a version that came after it was begun, it would undo that one unseen.
  const [begun, setBegun] = useState<PolicyView | null | "anew">(found);
  const isAnew = begun === "anew" || !edited;
  if (isAnew && begun !== found) setBegun(found);
  return {
    edition,
    document: draft ?? inForce,
    edited,
    base: isAnew ? found : begun,
    rebase: () => setBegun("anew"),
    edit: (document) => change({ draft: sameRules(document, inForce) ? undefined : document }, { replace: true }),
    discard: () => {
      change({ draft: undefined });
      setDiscarded(true);
    },
    saved: (document) => {
      if (draft !== undefined && sameRules(draft, document)) change({ draft: undefined });
    },
  };
}

/** The level's own policy, of what holds there. null: it has none. */
export function ownPolicy(found: PolicyView | null, run: string | undefined): PolicyView | null {
  return found !== null && (run === undefined || found.level === "run") ? found : null;
}

/** What another person has changed of a policy that was seen. Then the new one must be seen, before anything is done. */
export function usePolicyConflict(level: Level, onReload: () => void): () => Promise<Conflict> {
  const { kind, project, run, own } = level;
  const queries = useQueryClient();
  return async () => {
    const now = await queries.fetchQuery({ ...policyQuery(project, run ?? undefined, kind), staleTime: 0 });
    const after = ownPolicy(now, run ?? undefined);
    return { changes: changesOf(own?.document ?? {}, after?.document ?? {}), reload: onReload };
  };
}

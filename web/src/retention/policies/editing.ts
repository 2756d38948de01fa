import { useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import type { Schemas } from "@/api/client";
import type { Conflict } from "@/components/ConfirmDialog";
import { changesOf } from "@/format/changes";
import type { Level } from "../actions";
import { type PolicyDocument, sameRules } from "../rules";
import { policyQuery, useChangeSearch, useRetentionSearch } from "../useRetention";

type PolicyView = Schemas["PolicyView"];

const NO_DRAFT = { draft: undefined, begun: undefined };

export interface Draft {
  /** Of the fields: with a new one they begin anew. */
  edition: number;
  /** What the fields show: the edit, else what is in force. */
  document: PolicyDocument;
  edited: boolean;
  /** Another person has changed the policy since the edit was begun. An edit has whole documents: saved over a version
   * that came after it was begun, it would undo that one unseen. */
  isBehind: boolean;
  /** Goes on with the edit from this version, which the reader has seen. */
  rebase: (seen: PolicyView | null) => void;
  edit: (document: PolicyDocument) => void;
  discard: () => void;
  /** Ends the edit: the service has it. What was typed since is an edit of its own. */
  saved: (document: PolicyDocument) => void;
}

/** Names what holds: the same for the same version of the same level. */
export function editionOf(found: PolicyView | null): string {
  return found === null ? "none" : `${found.level} ${found.etag}`;
}

/** The edit of a policy, which is in the address until it is saved. `found`: what holds now. */
export function useDraft(found: PolicyView | null): Draft {
  const { draft, begun } = useRetentionSearch();
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
  return {
    edition,
    document: draft ?? inForce,
    edited,
    isBehind: edited && begun !== undefined && begun !== editionOf(found),
    rebase: (seen) => change({ begun: editionOf(seen) }, { replace: true }),
    edit: (document) => {
      const from = (draft && begun) ?? editionOf(found);
      change(sameRules(document, inForce) ? NO_DRAFT : { draft: document, begun: from }, { replace: true });
    },
    discard: () => {
      change(NO_DRAFT);
      setDiscarded(true);
    },
    saved: (document) => {
      if (draft !== undefined) change(sameRules(draft, document) ? NO_DRAFT : { begun: undefined });
    },
  };
}

/** The level's own policy, of what holds there. null: it has none. */
export function ownPolicy(found: PolicyView | null, run: string | undefined): PolicyView | null {
  return found !== null && (run === undefined || found.level === "run") ? found : null;
}

/** What another person has changed of a policy that was seen. Then the new one must be seen, before anything is done. */
export function usePolicyConflict(level: Level, onReload: (seen: PolicyView | null) => void): () => Promise<Conflict> {
  const { kind, project, run, own } = level;
  const queries = useQueryClient();
  return async () => {
    const now = await queries.fetchQuery({ ...policyQuery(project, run ?? undefined, kind), staleTime: 0 });
    const after = ownPolicy(now, run ?? undefined);
    return { changes: changesOf(own?.document ?? {}, after?.document ?? {}), reload: () => onReload(now) };
  };
}

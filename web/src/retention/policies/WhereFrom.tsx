import type { Schemas } from "@/api/client";
import { Time } from "@/components/values";
import type { PolicyDocument } from "../rules";

interface WhereFromProps {
  /** As it is called. */
  what: string;
  run: string | undefined;
  /** What holds now. */
  found: Schemas["PolicyView"] | null;
  words: (document: PolicyDocument) => string;
}

/** Which policy holds, and of which level it is. */
export function WhereFrom({ what, run, found, words }: WhereFromProps) {
  if (found === null)
    return <>{run === undefined ? `The project has no ${what}.` : `Neither this run nor its project has a ${what}.`}</>;
  const version = (
    <>
      version {found.version} by {found.updated_by}, <Time at={found.updated_at} />
    </>
  );
  const said = <code>{words(found.document)}</code>;
  if (run === undefined)
    return (
      <>
        The project’s policy, {version}: {said}. It holds for each run without a policy of its own.
      </>
    );
  return found.level === "run" ? (
    <>
      The run’s own policy, {version}: {said}.
    </>
  ) : (
    <>
      The project’s policy holds for this run, {version}: {said}. What you save here becomes the run’s own.
    </>
  );
}

import type { ReactNode } from "react";
import { type Scope, useSession } from "@/api/session";
import { EmptyState, Loading } from "@/components/states";
import { useProject, useProjects } from "./project";

/** Why the session's token may not see something, or undefined. `everyProject`: the service refuses a project's token. */
export function useRefusal(scope: Scope, everyProject = false): string | undefined {
  const { name, project, scopes } = useSession();
  if (!scopes.includes(scope)) {
    return `The token “${name}” has not the scope “${scope}”. Sign in with one that has it.`;
  }
  if (everyProject && project !== null) {
    return `The token “${name}” belongs to the project “${project}”. Sign in with one for every project.`;
  }
  return undefined;
}

/** A tab or a part for those who may see it, and for others the reason, without a call that would be refused. */
export function Allowed(props: { scope: Scope; everyProject?: boolean; what: string; children: ReactNode }) {
  const refusal = useRefusal(props.scope, props.everyProject);
  const project = useProject();
  const projects = useProjects();
  if (refusal === undefined) {
    // A list of one project is not asked for before it is known which.
    const isKnown = project !== undefined || projects.isFetched;
    return isKnown ? props.children : <Loading what={props.what.toLowerCase()} />;
  }
  return (
    <EmptyState title={`${props.what}: not for this token`}>
      <p>{refusal}</p>
    </EmptyState>
  );
}

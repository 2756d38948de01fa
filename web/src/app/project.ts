import { useMatches, useNavigate, useSearch } from "@tanstack/react-router";
import { useEffect } from "react";
import { useQuery } from "@/api/client";
import { useSession } from "@/api/session";

/** The first page of projects: those to choose from. */
export function useProjects() {
  return useQuery("get", "/v1/projects", { params: { query: { limit: 500 } } });
}

/** The project that the screen is about: that of the address, else the token's own, else the first by name. undefined:
 * there is none, or it is not known yet. */
export function useProject(): string | undefined {
  const { project } = useSearch({ from: "__root__" });
  const { project: own } = useSession();
  const wanted = project ?? own ?? undefined;
  const { data } = useProjects();
  return wanted ?? data?.items[0]?.name;
}

/** Puts the project into an address that names none: which one is the first changes with the list. A token's own does
 * not. An address where nothing is stays as it was typed. */
export function useProjectInAddress(): void {
  const { project: named } = useSearch({ from: "__root__" });
  const { project: own } = useSession();
  const project = useProject();
  const navigate = useNavigate();
  const isNowhere = useMatches().some((match) => match._notFound === true || match.status === "notFound");
  const isMissing = named === undefined && own === null && project !== undefined && !isNowhere;

  useEffect(() => {
    if (isMissing) void navigate({ to: ".", search: (old) => ({ ...old, project }), hash: true, replace: true });
  }, [isMissing, navigate, project]);
}

import { Link } from "@tanstack/react-router";
import type { ReactNode } from "react";

/** A run by its name, wherever a screen shows one: opens the run. */
export function RunName({ project, run, children }: { project: string; run: string; children?: ReactNode }) {
  return (
    <Link to="/runs/$run" params={{ run }} search={{ project }} title={`${project}/${run}`}>
      {children ?? run}
    </Link>
  );
}

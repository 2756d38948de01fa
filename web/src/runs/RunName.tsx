import type { ReactNode } from "react";

/** A run by its name, wherever a screen shows one. */
export function RunName({ project, run, children }: { project: string; run: string; children?: ReactNode }) {
  return <span title={`${project}/${run}`}>{children ?? run}</span>;
}

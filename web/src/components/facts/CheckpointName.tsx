import { Link } from "@tanstack/react-router";
import type { ReactNode } from "react";

/** A checkpoint by its step, as a link to its screen, wherever a screen shows one. `project`: its own, if that may be
 * another than the chosen one, which a link keeps. */
export function CheckpointName({ id, project, children }: { id: string; project?: string; children: ReactNode }) {
  return (
    <Link to="/checkpoints/$id" params={{ id }} {...(project && { search: { project } })} title={id}>
      {children}
    </Link>
  );
}

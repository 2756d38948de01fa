import { Link } from "@tanstack/react-router";
import type { ReactNode } from "react";

/** A checkpoint by its step, as a link to its screen, wherever a screen shows one. */
export function CheckpointName({ id, children }: { id: string; children: ReactNode }) {
  return (
    <Link to="/checkpoints/$id" params={{ id }} title={id}>
      {children}
    </Link>
  );
}

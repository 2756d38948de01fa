import { Link } from "@tanstack/react-router";
import type { ReactNode } from "react";
import { formatCount } from "@/format/numbers";

interface CheckpointLinkProps {
  id: string;
  step: number;
  children?: ReactNode;
}

/** A checkpoint by its step, wherever the run's screen shows one. */
export function CheckpointLink({ id, step, children }: CheckpointLinkProps) {
  return (
    <Link to="/checkpoints/$id" params={{ id }} title={id}>
      {children ?? formatCount(step)}
    </Link>
  );
}

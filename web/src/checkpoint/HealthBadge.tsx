import type { Schemas } from "@/api/client";
import { StateBadge } from "@/components/StateBadge";

/** `ok` as the glossary has it: healthy. */
export function HealthBadge({ health }: { health: Schemas["Health"] }) {
  return <StateBadge state={health === "ok" ? "healthy" : health} />;
}

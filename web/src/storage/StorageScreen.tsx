import { useNavigate, useSearch } from "@tanstack/react-router";
import type { ReactNode } from "react";
import { Allowed } from "@/app/Allowed";
import { useProject } from "@/app/project";
import { Screen } from "@/app/Screen";
import { RunPicker } from "@/components/choose/RunPicker";
import { BadCopies, SecondStore } from "./Copies";
import { Drills } from "./Drills";
import { Orphans } from "./Orphans";
import { Quota } from "./Quota";
import { Scrub } from "./Scrub";
import { Stores } from "./Stores";
import { Tiers } from "./Tiers";

/** Where the bytes are, and what proves that they can be read back. */
export function StorageScreen() {
  const project = useProject();
  const { run } = useSearch({ from: "/storage" });
  const navigate = useNavigate({ from: "/storage" });
  const picker = project !== undefined && (
    <RunPicker
      project={project}
      run={run}
      label="Run of drills, scrubs and tiers"
      none="none chosen"
      onChange={(chosen) => void navigate({ search: (old) => ({ ...old, run: chosen }), resetScroll: false })}
    />
  );
  return (
    <Screen title="Storage" controls={picker}>
      <Part id="stores" title="Stores">
        <Allowed scope="read" everyProject what="Stores">
          <Stores />
        </Allowed>
      </Part>
      <Part id="scrub" title="Scrub">
        <Scrub project={project} run={run} />
      </Part>
      {project !== undefined && <OfProject project={project} run={run} />}
      <Part id="orphans" title="Orphans, and what waits for collection">
        <Orphans />
      </Part>
    </Screen>
  );
}

function OfProject({ project, run }: { project: string; run: string | undefined }) {
  return (
    <>
      <Part id="bad" title="Bad copies">
        <BadCopies project={project} />
      </Part>
      <Part id="second" title="Second store">
        <SecondStore project={project} />
      </Part>
      <Part id="drills" title="Drills">
        <Drills project={project} run={run} />
      </Part>
      {run !== undefined && (
        <Part id="tiers" title={`Tiers of ${run}`}>
          <Tiers project={project} run={run} />
        </Part>
      )}
      <Part id="quota" title="Quota">
        <Quota project={project} />
      </Part>
    </>
  );
}

function Part({ id, title, children }: { id: string; title: string; children: ReactNode }) {
  return (
    <section aria-labelledby={id}>
      <h2 id={id}>{title}</h2>
      {children}
    </section>
  );
}

import { useState } from "react";
import { api, type Schemas, useQuery } from "@/api/client";
import { Operations, Start } from "./LongWork";

export function Drills({ project, run }: { project: string; run: string | undefined }) {
  // The list of stores is not for a project's token; their clocks are for every caller.
  const stores = useQuery("get", "/v1/store-clocks");
  const [chosen, setChosen] = useState<Schemas["StoreRole"]>("primary");
  return (
    <>
      <label>
        From the store alone{" "}
        <select value={chosen} onChange={(event) => setChosen(event.target.value as Schemas["StoreRole"])}>
          {(stores.data?.items ?? []).map((each) => (
            <option key={each.role}>{each.role}</option>
          ))}
        </select>
      </label>
      <Start
        name="Start a drill"
        of={run === undefined ? undefined : { run, store: chosen }}
        title={`Restore the newest of ${run} from the ${chosen} store`}
        text="Every byte is read from this store alone and checked, as a restore would. It takes as long as a restore does: that is the time to compare with your objective."
        start={({ run: name, store }, key) =>
          api.POST("/v1/projects/{project}/runs/{run}/drills", {
            params: { path: { project, run: name }, header: { "idempotency-key": key } },
            body: { selector: "latest", store },
          })
        }
      />
      <Operations project={project} kind="drill" empty="No drill was made yet" />
    </>
  );
}

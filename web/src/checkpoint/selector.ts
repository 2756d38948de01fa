import { api, type Schemas } from "@/api/client";

/** What a reader typed: a checkpoint by its id, or by a selector of a run. */
export type Target = { id: string } | { project: string; run: string; selector: string };

const ID = /^ck_[0-9a-f]{32}$/;

/** Reads `project/run@selector`, `project/run` (its latest), or an id. `near`: the run that a selector alone means.
 * Throws an Error that says what to type. */
export function readTarget(text: string, near?: { project: string; run: string }): Target {
  const typed = text.trim();
  if (ID.test(typed)) return { id: typed };
  const at = typed.indexOf("@");
  const [place, selector] = at < 0 ? [typed, "latest"] : [typed.slice(0, at), typed.slice(at + 1)];
  const [project, run, more] = place.split("/");
  if (project && run && more === undefined && selector !== "") return { project, run, selector };
  if (near !== undefined && typed !== "" && !typed.includes("/")) {
    return { ...near, selector: at === 0 ? selector : typed };
  }
  throw new Error(
    `“${typed}” names no checkpoint. Type project/run@selector, for example demo/gpt@latest, demo/gpt@1200, ` +
      "demo/gpt@1200#3 for one attempt, demo/gpt@best:loss, or an id that begins with ck_.",
  );
}

/** The checkpoint that a target means now. Throws ProblemError. */
export async function findCheckpoint(target: Target, signal?: AbortSignal): Promise<Schemas["CheckpointView"]> {
  const asked = signal === undefined ? {} : { signal };
  const reply =
    "id" in target
      ? await api.GET("/v1/checkpoints/{checkpoint_id}", { params: { path: { checkpoint_id: target.id } }, ...asked })
      : await api.GET("/v1/projects/{project}/runs/{run}/checkpoints/{selector}", {
          params: { path: target },
          ...asked,
        });
  if (reply.data === undefined) throw new Error("The service gave no checkpoint. Retry.");
  return reply.data;
}

/** As every command accepts it: `demo/gpt@1200#2`. */
export function nameOf(checkpoint: { project: string; run: string; step: number; attempt: number }): string {
  const { project, run, step, attempt } = checkpoint;
  return `${project}/${run}@${step}#${attempt}`;
}

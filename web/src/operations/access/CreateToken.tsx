import { useState } from "react";
import { api, type Schemas } from "@/api/client";
import { useOnce } from "@/api/repeats";
import { type Scope, useSession } from "@/api/session";
import { useProject, useProjects } from "@/app/project";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import styles from "../Operations.module.css";
import { oneOf } from "../parts";

/** Each scope once; one that is missing is an error of the compiler. */
const SCOPES: Record<Scope, string> = {
  train: "train: save and restore",
  read: "read: see everything",
  operate: "operate: pin, hold, prune, drill, pause",
  admin: "admin: tokens, webhooks, quotas",
  metrics: "metrics: scrape /metrics",
};
const DAY = 86_400;
const LIFETIMES: readonly (readonly [string, number | null])[] = [
  ["1 day", DAY],
  ["7 days", 7 * DAY],
  ["30 days", 30 * DAY],
  ["90 days", 90 * DAY],
  ["1 year", 365 * DAY],
  ["never", null],
];
const USUAL_LIFETIME = "90 days";

interface CreateTokenProps {
  onCreated: (token: Schemas["TokenCreated"]) => void;
  onClose: () => void;
}

export function CreateToken({ onCreated, onClose }: CreateTokenProps) {
  const session = useSession();
  const projects = useProjects();
  const current = useProject();
  const [name, setName] = useState("");
  const [scopes, setScopes] = useState<Scope[]>([]);
  const [project, setProject] = useState(current ?? "");
  const [lifetime, setLifetime] = useState(USUAL_LIFETIME);
  const post = useOnce((body: Schemas["CreateToken"], key) =>
    api.POST("/v1/tokens", { params: { header: { "idempotency-key": key } }, body }),
  );

  async function create() {
    const { data } = await post({
      name: name.trim(),
      scopes,
      project: project || null,
      expires_in_seconds: LIFETIMES.find(([words]) => words === lifetime)?.[1] ?? null,
    });
    if (data) onCreated(data);
  }

  return (
    <ConfirmDialog title="A new token" action="Make the token" onConfirm={create} onClose={onClose}>
      <div className={styles.fields}>
        <label className={styles.field}>
          Name
          <input
            required
            pattern=".*\S.*"
            title="A few words"
            maxLength={100}
            autoComplete="off"
            placeholder="demo trainers"
            value={name}
            onChange={(event) => setName(event.target.value)}
          />
          <small>Audit events name it: say who or what uses the token.</small>
        </label>
        <fieldset>
          <legend>Scopes</legend>
          <div className={styles.choices}>
            {(Object.keys(SCOPES) as Scope[]).map((scope) => {
              const missing = !session.scopes.includes(scope);
              return (
                <label key={scope} className={styles.check}>
                  <input
                    ref={oneOf(scopes)}
                    type="checkbox"
                    disabled={missing}
                    checked={scopes.includes(scope)}
                    onChange={(event) =>
                      setScopes((old) =>
                        event.target.checked ? [...old, scope] : old.filter((each) => each !== scope),
                      )
                    }
                  />
                  <span>
                    {SCOPES[scope]}
                    {missing && <small> (your token has it not, and gives it to no other)</small>}
                  </span>
                </label>
              );
            })}
          </div>
        </fieldset>
        <label className={styles.field}>
          Project
          <select value={project} onChange={(event) => setProject(event.target.value)}>
            {session.project === null && <option value="">every project</option>}
            {(projects.data?.items ?? []).map((each) => (
              <option key={each.id}>{each.name}</option>
            ))}
          </select>
        </label>
        <label className={styles.field}>
          Expires after
          <select value={lifetime} onChange={(event) => setLifetime(event.target.value)}>
            {LIFETIMES.map(([words]) => (
              <option key={words}>{words}</option>
            ))}
          </select>
        </label>
      </div>
    </ConfirmDialog>
  );
}

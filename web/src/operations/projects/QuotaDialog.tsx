import { useState } from "react";
import { api, type Schemas } from "@/api/client";
import { ConfirmDialog, type Conflict } from "@/components/ConfirmDialog";
import { changesOf } from "@/format/changes";
import { formatBytes, formatCount } from "@/format/numbers";
import { refresh } from "@/live/refresh";
import { exactBytes, exactCount, parseBytes, parseCount } from "../changes";
import styles from "../Operations.module.css";

type ProjectView = Schemas["ProjectView"];
type Kind = Schemas["QuotaView"]["kind"];
type Quota = keyof Schemas["EditProject"];
type Texts = Record<Quota, string>;

const COUNTS: Record<Kind, string> = {
  bytes: "in the primary store",
  objects: "copies of chunks in the primary store",
  runs: "that are not in the trash",
  checkpoints: "committed or uploading",
  rows: "of the catalog, for copies and chunk lists",
};
const KINDS = Object.keys(COUNTS) as Kind[];
const QUOTAS: { name: Quota; kind: Kind; label: string }[] = KINDS.flatMap((kind) => [
  { name: `quota_${kind}`, kind, label: `Quota of ${kind}` },
  { name: `soft_quota_${kind}`, kind, label: `Soft quota of ${kind}` },
]);

/** `of`: null for a new project. What a person has not touched is not sent: another person may have changed it. */
export function QuotaDialog({ of, onClose }: { of: ProjectView | null; onClose: () => void }) {
  const [seen, setSeen] = useState(of);
  const [name, setName] = useState("");
  const [opened, setOpened] = useState(() => textsOf(of));
  const [texts, setTexts] = useState(opened);

  async function put() {
    const edited = QUOTAS.filter((each) => texts[each.name] !== opened[each.name]);
    await api.PUT("/v1/projects/{project}", {
      params: { path: { project: seen?.name ?? name }, header: seen === null ? {} : { "if-match": seen.etag } },
      body: Object.fromEntries(edited.map((each) => [each.name, parse(each.kind, texts[each.name])])),
    });
    void refresh("/v1/projects");
  }

  async function conflict(before: ProjectView): Promise<Conflict> {
    const { data: now } = await api.GET("/v1/projects/{project}", { params: { path: { project: before.name } } });
    if (now === undefined) throw new Error("The service gave no project.");
    return { changes: changesOf(shown(before), shown(now)), reload: () => take(now) };
  }

  /** Fields that nobody has touched show what holds now. */
  function take(now: ProjectView) {
    const anew = textsOf(now);
    const kept = QUOTAS.filter((each) => texts[each.name] !== opened[each.name]);
    setTexts({ ...anew, ...Object.fromEntries(kept.map((each) => [each.name, texts[each.name]])) });
    setOpened(anew);
    setSeen(now);
  }

  function field({ name, kind, label }: (typeof QUOTAS)[number]) {
    const example = kind === "bytes" ? "1.5 TiB or 500 GB" : "500, 20k or 5M";
    const wrong =
      parse(kind, texts[name]) === undefined ? `A number of ${kind}, for example ${example}; empty: none.` : "";
    return (
      <td key={name}>
        <input
          ref={(input) => input?.setCustomValidity(wrong)}
          aria-label={label}
          autoComplete="off"
          placeholder="none"
          value={texts[name]}
          onChange={(event) => setTexts({ ...texts, [name]: event.target.value })}
        />
      </td>
    );
  }

  return (
    <ConfirmDialog
      title={of === null ? "A new project" : `The quotas of ${of.name}`}
      action={of === null ? "Make the project" : "Set the quotas"}
      onConfirm={put}
      onConflict={seen === null ? undefined : () => conflict(seen)}
      onClose={onClose}
    >
      <p>
        What would pass a quota is refused; nothing is deleted. From a soft quota on the service tells, and refuses
        nothing. Bytes such as 1.5 TiB or 500 GB, numbers such as 500, 20k or 5M; empty: no limit.
      </p>
      <div className={styles.fields}>
        {of === null && (
          <label className={styles.field}>
            Name
            <input
              required
              pattern="[A-Za-z0-9][A-Za-z0-9._\-]{0,99}"
              title="Letters, digits, dots, underscores and hyphens; at most 100"
              autoComplete="off"
              value={name}
              onChange={(event) => setName(event.target.value)}
            />
          </label>
        )}
        <table className={styles.quotas}>
          <thead>
            <tr>
              <th scope="col">Of</th>
              <th scope="col">Quota</th>
              <th scope="col">Soft quota</th>
            </tr>
          </thead>
          <tbody>
            {KINDS.map((kind) => (
              <tr key={kind}>
                <th scope="row">
                  {kind} <small>{COUNTS[kind] + usedOf(seen, kind)}</small>
                </th>
                {QUOTAS.filter((each) => each.kind === kind).map(field)}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </ConfirmDialog>
  );
}

/** null: no quota; undefined: it cannot be read. */
function parse(kind: Kind, text: string): number | null | undefined {
  return kind === "bytes" ? parseBytes(text) : parseCount(text);
}

function usedOf(of: ProjectView | null, kind: Kind): string {
  const used = of?.quotas?.find((each) => each.kind === kind)?.used;
  if (used === undefined) return "";
  return `; now ${kind === "bytes" ? formatBytes(used) : formatCount(used)}`;
}

/** As the fields show them. */
function textsOf(of: ProjectView | null): Texts {
  const text = (kind: Kind, quota: number | null | undefined) =>
    quota == null ? "" : kind === "bytes" ? exactBytes(quota) : exactCount(quota);
  return Object.fromEntries(
    KINDS.flatMap((kind) => {
      const set = of?.quotas?.find((each) => each.kind === kind);
      return [
        [`quota_${kind}`, text(kind, set?.hard)],
        [`soft_quota_${kind}`, text(kind, set?.soft)],
      ];
    }),
  ) as Texts;
}

/** What the dialog edits, in words. */
function shown(of: ProjectView): Record<string, string> {
  const texts = textsOf(of);
  return Object.fromEntries(QUOTAS.map(({ name, label }) => [label, texts[name] || "none"]));
}

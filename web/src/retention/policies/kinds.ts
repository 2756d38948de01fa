import type { Schemas } from "@/api/client";
import { formatSeconds } from "@/format/moments";
import type { OtherKind } from "../route";
import { type BestFields, numberOr, type PolicyDocument } from "../rules";

/** What the forms of these policies hold, and the documents that they are. The service checks the documents. */

export const KINDS: Record<OtherKind, { title: string; what: string; effect: string }> = {
  copies: {
    title: "Copies",
    what: "policy of copies",
    effect:
      "The service copies to the second store what the policy wants: every checkpoint, or those that meet one of the conditions. What it wants no more keeps its copy until the checkpoint is deleted.",
  },
  tiers: {
    title: "Tiers",
    what: "policy of tiers",
    effect:
      "Checkpoints move to colder storage by their age. What is in an archive or in the cold store must be thawed before it can be read. The two newest healthy ones of each run stay hot, and so does what is being read.",
  },
  objectives: {
    title: "Objectives",
    what: "policy of objectives",
    effect:
      "What can be borne when the first store is lost. The service does nothing by it but compare, in the list of copies and in the result of each drill.",
  },
};

type CheckpointKind = Schemas["CheckpointKind"];
const EACH_KIND: Record<CheckpointKind, true> = { periodic: true, emergency: true, final: true };
export const CHECKPOINT_KINDS = Object.keys(EACH_KIND) as CheckpointKind[];

/** From the hottest to the coldest. */
export const TARGETS: Readonly<Record<string, string>> = {
  infrequent: "infrequent (a storage class, read at once)",
  rare: "rare (a storage class, read at once, dearly)",
  archive: "archive (a storage class, thawed first)",
  deep_archive: "deep archive (a storage class, thawed first)",
  cold: "the cold store (copied back first)",
};

export interface ObjectivesFields {
  rpo: string;
  rto: string;
}

export interface CopiesFields {
  /** With commas between. */
  labels: string;
  kinds: CheckpointKind[];
  everySteps: string;
  /** Without a metric: no condition. */
  best: BestFields;
}

export interface TierRuleFields {
  after: string;
  /** Of TARGETS; empty: none is chosen. */
  target: string;
}

export interface TiersFields {
  rules: TierRuleFields[];
  labels: string;
  kinds: CheckpointKind[];
  pinned: boolean;
}

export const objectives = {
  read: (document: PolicyDocument): ObjectivesFields => ({
    rpo: spanText(document.rpo_seconds),
    rto: spanText(document.rto_seconds),
  }),
  write: ({ rpo, rto }: ObjectivesFields, base: PolicyDocument): PolicyDocument =>
    withBase(base, ["rpo_seconds", "rto_seconds"], {
      ...(rpo.trim() && { rpo_seconds: secondsOr(rpo.trim()) }),
      ...(rto.trim() && { rto_seconds: secondsOr(rto.trim()) }),
    }),
};

export const copies = {
  read: (document: PolicyDocument): CopiesFields => {
    const { metric, mode, n } = (document.best ?? {}) as Record<string, unknown>;
    return {
      labels: listed(document.labels).join(", "),
      kinds: kindsOf(document.kinds),
      everySteps: document.every_steps == null ? "" : String(document.every_steps),
      best: { metric: String(metric ?? ""), mode: mode === "max" ? "max" : "min", n: String(n ?? 1) },
    };
  },
  write: ({ labels, kinds, everySteps, best }: CopiesFields, base: PolicyDocument): PolicyDocument =>
    withBase(base, ["labels", "kinds", "every_steps", "best"], {
      ...(words(labels).length > 0 && { labels: words(labels) }),
      ...(kinds.length > 0 && { kinds }),
      ...(everySteps.trim() && { every_steps: numberOr(everySteps.trim()) }),
      ...(best.metric.trim() && {
        best: {
          metric: best.metric.trim(),
          ...(best.mode === "max" && { mode: best.mode }),
          ...(best.n.trim() !== "1" && { n: numberOr(best.n.trim()) }),
        },
      }),
    }),
};

export const tiers = {
  read: (document: PolicyDocument): TiersFields => {
    const hot = (document.stay_hot ?? {}) as Record<string, unknown>;
    const rules = Array.isArray(document.rules) ? document.rules : [];
    return {
      rules: rules.map(({ after, storage_class, to }: Record<string, unknown>) => ({
        after: String(after ?? ""),
        target: String(storage_class ?? to ?? ""),
      })),
      labels: listed(hot.labels).join(", "),
      kinds: kindsOf(hot.kinds),
      pinned: hot.pinned !== false,
    };
  },
  write: ({ rules, labels, kinds, pinned }: TiersFields, base: PolicyDocument): PolicyDocument => {
    const hot = withBase((base.stay_hot ?? {}) as PolicyDocument, ["labels", "kinds", "pinned"], {
      ...(words(labels).length > 0 && { labels: words(labels) }),
      ...(kinds.length > 0 && { kinds }),
      ...(!pinned && { pinned }),
    });
    return withBase(base, ["rules", "stay_hot"], {
      ...(rules.length > 0 && {
        rules: rules.map(({ after, target }) => ({
          after: after.trim(),
          ...(target === "cold" ? { to: target } : target && { storage_class: target }),
        })),
      }),
      ...(Object.keys(hot).length > 0 && { stay_hot: hot }),
    });
  },
};

/** A policy for a line. */
export function policyInWords(kind: OtherKind, document: PolicyDocument): string {
  if (kind === "objectives") {
    const { rpo_seconds: rpo, rto_seconds: rto } = document;
    const said = [rpo != null && `RPO ${spanInWords(rpo)}`, rto != null && `RTO ${spanInWords(rto)}`].filter(Boolean);
    return said.join(", ") || "no objective";
  }
  if (kind === "copies") {
    const { labels, kinds, everySteps, best } = copies.read(document);
    const wanted = [
      labels && `label ${labels}`,
      kinds.length > 0 && `kind ${kinds.join(" or ")}`,
      everySteps && `each multiple of ${everySteps} steps`,
      best.metric && `best ${best.n} by ${best.metric} (${best.mode})`,
    ].filter(Boolean);
    return wanted.length === 0 ? "every checkpoint" : wanted.join(", or ");
  }
  const { rules, labels, kinds, pinned } = tiers.read(document);
  const hot = [labels && `label ${labels}`, kinds.length > 0 && `kind ${kinds.join(" or ")}`].filter(Boolean);
  return [
    rules.map(({ after, target }) => `after ${after}: ${target}`).join(", ") || "no rule",
    ...(hot.length > 0 ? [`hot for ever: ${hot.join(", ")}`] : []),
    ...(pinned ? [] : ["pinned ones move, too"]),
  ].join("; ");
}

/** What the fields say, and of `base` what no field holds: a newer service's field stays as it was. */
function withBase(base: PolicyDocument, known: readonly string[], said: PolicyDocument): PolicyDocument {
  return { ...Object.fromEntries(Object.entries(base).filter(([name]) => !known.includes(name))), ...said };
}

const UNITS: readonly (readonly [string, number])[] = [
  ["d", 86_400],
  ["h", 3600],
  ["min", 60],
  ["s", 1],
];

/** 5400 -> "90min". What is no number stays as it is. */
function spanText(value: unknown): string {
  if (typeof value !== "number") return value == null ? "" : String(value);
  const [unit, size] = UNITS.find(([, seconds]) => value % seconds === 0) ?? ["s", 1];
  return `${value / size}${unit}`;
}

/** "90min" -> 5400. What it cannot read goes to the service as it is written: that says what is wrong. */
function secondsOr(text: string): number | string {
  const found = /^(\d{1,12}) ?(d|h|min|s)?$/.exec(text);
  if (found === null) return text;
  const size = UNITS.find(([unit]) => unit === (found[2] ?? "s"))?.[1] ?? 1;
  return Number(found[1]) * size;
}

function spanInWords(value: unknown): string {
  return typeof value === "number" ? formatSeconds(value) : String(value);
}

function words(text: string): string[] {
  return text
    .split(",")
    .map((each) => each.trim())
    .filter(Boolean);
}

function listed(value: unknown): string[] {
  return Array.isArray(value) ? value.map(String) : [];
}

function kindsOf(value: unknown): CheckpointKind[] {
  const given = listed(value);
  return CHECKPOINT_KINDS.filter((each) => given.includes(each));
}

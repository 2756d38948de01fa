import { useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { useState } from "react";
import type { Schemas } from "@/api/client";
import { Can } from "@/components/Can";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { Reply } from "@/components/states";
import { Tiers } from "@/storage/Tiers";
import { deletePolicy, type Level, savePolicy } from "../actions";
import styles from "../Retention.module.css";
import type { OtherKind } from "../route";
import type { PolicyDocument } from "../rules";
import { policyQuery } from "../useRetention";
import { BEHIND, Behind } from "./Behind";
import { Editor } from "./Editors";
import { ownPolicy, useDraft, usePolicyConflict } from "./editing";
import { type Wrong, wrongOf } from "./fields";
import { KINDS, policyInWords } from "./kinds";
import { WhereFrom } from "./WhereFrom";

interface PolicyOfKindProps {
  kind: OtherKind;
  project: string;
  run: string | undefined;
}

/** A policy that expires nothing: what holds, from where, and its edit. */
export function PolicyOfKind(props: PolicyOfKindProps) {
  const { kind, project, run } = props;
  const policy = useQuery(policyQuery(project, run, kind));
  const [said, setSaid] = useState("");
  return (
    <>
      {said !== "" && (
        <p role="status" className={styles.done}>
          {said}
        </p>
      )}
      <Reply of={policy} what="the policy">
        {(found) => <Editing {...props} found={found} onSaid={setSaid} />}
      </Reply>
      {kind === "tiers" && run !== undefined && (
        <section aria-labelledby="moves">
          <h2 id="moves">What moves under the policy in force</h2>
          <p className="quiet">The service plans by what is saved: of an edit it makes no plan.</p>
          <Tiers project={project} run={run} />
        </section>
      )}
    </>
  );
}

interface EditingProps extends PolicyOfKindProps {
  /** What holds now. */
  found: Schemas["PolicyView"] | null;
  onSaid: (said: string) => void;
}

function Editing({ kind, project, run, found, onSaid }: EditingProps) {
  const draft = useDraft(found);
  const [wrong, setWrong] = useState<Wrong>({});
  const { document, edited } = draft;
  const own = ownPolicy(found, run);
  const level: Level = { kind, project, run: run ?? null, own };
  // With no condition at all it is a policy, too: every checkpoint is copied.
  const isAll = kind === "copies" && found === null && !edited;

  function edit(changed: PolicyDocument) {
    setWrong({});
    onSaid("");
    draft.edit(changed);
  }

  function discard() {
    setWrong({});
    draft.discard();
  }

  function saved(what: PolicyDocument) {
    draft.saved(what);
    onSaid("The policy is saved.");
  }

  return (
    <>
      <p>
        <WhereFrom what={KINDS[kind].what} run={run} found={found} words={(inForce) => policyInWords(kind, inForce)} />
      </p>
      <p className="quiet">
        {KINDS[kind].effect}{" "}
        <Link to="/storage" search={run === undefined ? {} : { run }}>
          How copies, drills and tiers are
        </Link>
      </p>
      <Behind of={draft} found={found} />
      <Editor key={draft.edition} kind={kind} initial={document} wrong={wrong} onChange={edit} />
      <NotSaved wrong={wrong} />
      <div className={styles.bar}>
        <span role="status">
          {edited ? "Edited, and not saved." : found === null ? "Nothing is edited yet." : "As it is in force."}
        </span>
        {(edited || isAll) && (
          <Save
            level={level}
            document={document}
            isBehind={draft.isBehind}
            action={isAll ? "Copy every checkpoint" : "Save the policy"}
            onWrong={setWrong}
            onSaved={saved}
            onReload={draft.rebase}
          />
        )}
        {edited && (
          <button type="button" onClick={discard}>
            Discard the edit
          </button>
        )}
        {own !== null && !edited && <DeletePolicy level={level} onDone={() => onSaid("The policy is deleted.")} />}
      </div>
    </>
  );
}

/** That fields are wrong, and what is said of none of them. */
function NotSaved({ wrong }: { wrong: Wrong }) {
  const ways = Object.keys(wrong);
  if (ways.length === 0) return null;
  const others = ways.filter((way) => !FIELDS.some((field) => way === field || way.startsWith(`${field}.`)));
  return (
    <div role="alert">
      <p>The service has not saved it. {others.length < ways.length && "What is wrong stands at the fields."}</p>
      {others.length > 0 && (
        <ul className={styles.said}>
          {others.map((way) => (
            <li key={way}>
              {way !== "" && <code>{way}</code>} {wrong[way]}
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}

const FIELDS = [
  ...["rpo_seconds", "rto_seconds"],
  ...["labels", "kinds", "every_steps", "best.metric", "best.n"],
  ...["rules", "stay_hot.labels", "stay_hot.kinds"],
];

interface SaveProps {
  level: Level;
  document: PolicyDocument;
  /** Another person has changed the policy since the edit was begun. */
  isBehind: boolean;
  action: string;
  onWrong: (wrong: Wrong) => void;
  onSaved: (document: PolicyDocument) => void;
  /** Another person's version was seen. */
  onReload: (seen: Schemas["PolicyView"] | null) => void;
}

function Save({ level, document, isBehind, action, onWrong, onSaved, onReload }: SaveProps) {
  // What was seen when the dialog was opened: exactly that is saved.
  const [asked, setAsked] = useState<{ level: Level; document: PolicyDocument } | null>(null);
  const conflict = usePolicyConflict(asked?.level ?? level, reload);
  const kind = level.kind as OtherKind;
  const name = level.run === null ? `the project ${level.project}` : `the run ${level.run}`;

  function reload(seen: Schemas["PolicyView"] | null) {
    setAsked(null);
    onReload(seen);
  }

  async function save(seen: { level: Level; document: PolicyDocument }) {
    try {
      await savePolicy(seen.level, seen.document);
    } catch (error) {
      const wrong = wrongOf(error);
      if (wrong === null) throw error;
      // The fields say it better than a dialog that covers them.
      onWrong(wrong);
      return;
    }
    onSaved(seen.document);
  }

  return (
    <>
      <Can scope="operate" reason={isBehind ? BEHIND : undefined}>
        <button type="button" className="primary" onClick={() => setAsked({ level, document })}>
          {action}
        </button>
      </Can>
      {asked !== null && (
        <ConfirmDialog
          title={`${KINDS[kind].title} of ${level.run ?? level.project}`}
          action="Save"
          onConfirm={() => save(asked)}
          onConflict={conflict}
          onClose={() => setAsked(null)}
        >
          <p>
            The {KINDS[kind].what} of {name} will be: <code>{policyInWords(kind, asked.document)}</code>
            {level.run === null && ", for every run that has none of its own, old or to come"}.
          </p>
        </ConfirmDialog>
      )}
    </>
  );
}

function DeletePolicy({ level, onDone }: { level: Level; onDone: () => void }) {
  const [seen, setSeen] = useState<Level | null>(null);
  const conflict = usePolicyConflict(seen ?? level, () => setSeen(null));
  const { what } = KINDS[level.kind as OtherKind];
  return (
    <>
      <Can scope="operate">
        <button type="button" className="danger" onClick={() => setSeen(level)}>
          Delete the policy
        </button>
      </Can>
      {seen !== null && (
        <ConfirmDialog
          title={`Delete the ${what} of ${level.run ?? level.project}`}
          action="Delete"
          onConfirm={() => deletePolicy(seen).then(onDone)}
          onConflict={conflict}
          onClose={() => setSeen(null)}
        >
          <p>
            {level.run === null
              ? `Then there is no ${what}, but for runs that have their own.`
              : `Then the project’s ${what} holds for the run, if there is one.`}
          </p>
        </ConfirmDialog>
      )}
    </>
  );
}

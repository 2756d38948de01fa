import { useEffect, useId, useState } from "react";
import type { Schemas } from "@/api/client";
import { ProblemError } from "@/api/problem";
import styles from "../Retention.module.css";
import type { PolicyDocument } from "../rules";
import { CHECKPOINT_KINDS } from "./kinds";

const SETTLED_AFTER_MS = 350;

/** What the service says of each field, by the way to it: `rules.0.after`. "": of the document as a whole. */
export type Wrong = Readonly<Record<string, string>>;

/** null: the call failed for another reason than a wrong field. */
export function wrongOf(error: unknown): Wrong | null {
  const context = error instanceof ProblemError && error.problem.status === 422 ? error.problem.context : undefined;
  const errors = context?.errors as { where: string[]; message: string }[] | undefined;
  if (errors === undefined) return null;
  // The way begins with where the document stands in the call: body, document.
  return Object.fromEntries(errors.map(({ where, message }) => [where.slice(2).join("."), message]));
}

/** What is said of a field, or of what is in it. */
export function wrongAt(wrong: Wrong, way: string): string | undefined {
  return Object.entries(wrong).find(([each]) => each === way || each.startsWith(`${way}.`))?.[1];
}

export interface EditorProps {
  /** What the fields begin with. Another key begins anew. */
  initial: PolicyDocument;
  wrong: Wrong;
  /** Called once the reader pauses. */
  onChange: (document: PolicyDocument) => void;
}

interface Form<Fields> {
  read: (document: PolicyDocument) => Fields;
  write: (fields: Fields, base: PolicyDocument) => PolicyDocument;
}

/** The fields of a form, and how they are changed. */
export function useFields<Fields>({ read, write }: Form<Fields>, { initial, onChange }: Omit<EditorProps, "wrong">) {
  const [fields, setFields] = useState(() => read(initial));
  const [touched, setTouched] = useState(false);

  // biome-ignore lint/correctness/useExhaustiveDependencies: only what is typed makes a change.
  useEffect(() => {
    if (!touched) return;
    const timer = window.setTimeout(() => onChange(write(fields, initial)), SETTLED_AFTER_MS);
    return () => window.clearTimeout(timer);
  }, [fields, touched]);

  function change(next: Partial<Fields>) {
    setTouched(true);
    setFields((old) => ({ ...old, ...next }));
  }
  return [fields, change] as const;
}

interface TextFieldProps {
  label: string;
  example: string;
  value: string;
  wrong: string | undefined;
  onChange: (value: string) => void;
}

/** A field with what is wrong with it. */
export function TextField({ label, example, value, wrong, onChange }: TextFieldProps) {
  const id = useId();
  return (
    <div className={styles.field}>
      <label htmlFor={id}>{label}</label>
      <input
        id={id}
        value={value}
        placeholder={`for example ${example}`}
        autoComplete="off"
        aria-invalid={wrong !== undefined}
        aria-describedby={wrong === undefined ? undefined : `${id}-wrong`}
        onChange={(event) => onChange(event.target.value)}
      />
      <WrongField id={`${id}-wrong`} wrong={wrong} />
    </div>
  );
}

export function WrongField({ id, wrong }: { id?: string; wrong: string | undefined }) {
  if (wrong === undefined) return null;
  return (
    <span id={id} className={styles.wrong}>
      {wrong}
    </span>
  );
}

interface KindsProps {
  legend: string;
  kinds: readonly Schemas["CheckpointKind"][];
  wrong: string | undefined;
  onChange: (kinds: Schemas["CheckpointKind"][]) => void;
}

/** Kinds of checkpoints. */
export function KindsOfCheckpoints({ legend, kinds, wrong, onChange }: KindsProps) {
  return (
    <fieldset className={styles.checks}>
      <legend className="quiet">{legend}</legend>
      {CHECKPOINT_KINDS.map((each) => (
        <label key={each}>
          <input
            type="checkbox"
            checked={kinds.includes(each)}
            onChange={({ target }) =>
              onChange(CHECKPOINT_KINDS.filter((one) => (one === each ? target.checked : kinds.includes(one))))
            }
          />{" "}
          {each}
        </label>
      ))}
      <WrongField wrong={wrong} />
    </fieldset>
  );
}

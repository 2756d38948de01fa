import type { ReactNode } from "react";
import { useEffect, useId, useLayoutEffect, useRef, useState } from "react";
import { queryClient } from "@/api/client";
import { type Scope, useSession } from "@/api/session";
import { useProject, useProjects } from "@/app/project";
import { HintPlace } from "@/components/Hint";
import { EmptyState, ErrorState, Loading } from "@/components/states";
import styles from "./Operations.module.css";

/** Why the session's token may not see a tab, or undefined. `everyProject`: the service refuses a project's token. */
export function useRefusal(scope: Scope, everyProject = false): string | undefined {
  const { name, project, scopes } = useSession();
  if (!scopes.includes(scope)) {
    return `The token “${name}” has not the scope “${scope}”. Sign in with one that has it.`;
  }
  if (everyProject && project !== null) {
    return `The token “${name}” belongs to the project “${project}”. Sign in with one for every project.`;
  }
  return undefined;
}

/** A tab for those who may see it, and for others the reason, without a call that would be refused. */
export function Allowed(props: { scope: Scope; everyProject?: boolean; what: string; children: ReactNode }) {
  const refusal = useRefusal(props.scope, props.everyProject);
  const project = useProject();
  const projects = useProjects();
  if (refusal === undefined) {
    // A list of one project is not asked for before it is known which.
    const isKnown = project !== undefined || projects.isFetched;
    return isKnown ? props.children : <Loading what={props.what.toLowerCase()} />;
  }
  return (
    <EmptyState title={`${props.what}: not for this token`}>
      <p>{refusal}</p>
    </EmptyState>
  );
}

/** For the header Idempotency-Key: any text that no other call has. Over plain HTTP a browser has no randomUUID. */
export function newKey(): string {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** For each checkbox of a group, as its ref: the browser sends the form only if one is chosen, and says why not. */
export function oneOf(chosen: readonly unknown[]) {
  return (box: HTMLInputElement | null) => box?.setCustomValidity(chosen.length === 0 ? "Choose at least one." : "");
}

/** Asks again for all replies of these paths. */
export function refresh(...paths: string[]): Promise<unknown> {
  return Promise.all(paths.map((path) => queryClient.invalidateQueries({ queryKey: ["get", path] })));
}

/** Asks again every few seconds while the tab is in sight: for what no event tells. null: not now. */
export function useRefresh(path: string, milliseconds: number | null) {
  useEffect(() => {
    if (milliseconds === null) return undefined;
    const timer = window.setInterval(() => {
      if (document.visibilityState === "visible") void refresh(path);
    }, milliseconds);
    return () => window.clearInterval(timer);
  }, [path, milliseconds]);
}

export interface Action {
  /** Makes the call, and says `done` when the service has taken it. */
  run: (call: () => Promise<unknown>, done: string) => Promise<void>;
  said: string;
  error: unknown;
  busy: boolean;
}

/** Calls that a button makes at once, without a dialog. `paths`: what is asked for again after each. */
export function useAction(...paths: string[]): Action {
  const [said, setSaid] = useState("");
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);

  async function run(call: () => Promise<unknown>, done: string) {
    setBusy(true);
    setError(null);
    setSaid("");
    try {
      await call();
      setSaid(done);
    } catch (failure) {
      setError(failure);
    } finally {
      setBusy(false);
      void refresh(...paths);
    }
  }
  return { run, said, error, busy };
}

/** What came of the last action. */
export function ActionReport({ of: { said, error } }: { of: Action }) {
  return (
    <>
      <p role="status" className={styles.said}>
        {said}
      </p>
      {error !== null && <ErrorState error={error} />}
    </>
  );
}

interface TextFilterProps {
  label: string;
  value: string | undefined;
  onChange: (value: string | undefined) => void;
  /** Offered while it is typed. */
  known?: readonly string[];
  type?: "text" | "datetime-local";
}

/** A filter that is typed: it holds on Enter, and when the field is left. */
export function TextFilter({ label, value, onChange, known, type = "text" }: TextFilterProps) {
  const id = useId();
  const field = useRef<HTMLInputElement>(null);
  // The address may change without this field: Back, a link, another project.
  useEffect(() => {
    if (field.current) field.current.value = value ?? "";
  }, [value]);
  const take = (typed: string) => {
    const wanted = typed.trim() || undefined;
    if (wanted !== value) onChange(wanted);
  };
  return (
    <label className={styles.filter}>
      {label}
      <input
        ref={field}
        type={type}
        defaultValue={value ?? ""}
        list={known ? id : undefined}
        autoComplete="off"
        onBlur={(event) => take(event.target.value)}
        onKeyDown={(event) => {
          if (event.key === "Enter") take(event.currentTarget.value);
        }}
      />
      {known && (
        <datalist id={id}>
          {known.map((each) => (
            <option key={each} value={each} />
          ))}
        </datalist>
      )}
    </label>
  );
}

interface ChoiceProps<Value extends string> {
  label: string;
  value: Value | undefined;
  offered: readonly Value[];
  onChange: (value: Value | undefined) => void;
}

export function Choice<Value extends string>({ label, value, offered, onChange }: ChoiceProps<Value>) {
  return (
    <label className={styles.filter}>
      {label}
      <select
        value={value ?? ""}
        onChange={(event) => onChange((event.target.value || undefined) as Value | undefined)}
      >
        <option value="">all</option>
        {offered.map((each) => (
          <option key={each}>{each}</option>
        ))}
      </select>
    </label>
  );
}

interface EverywhereProps {
  project: string | undefined;
  everywhere: boolean;
  onChange: (everywhere: true | undefined) => void;
}

/** One project, or all of them: for a token that sees all. */
export function Everywhere({ project, everywhere, onChange }: EverywhereProps) {
  const session = useSession();
  if (session.project !== null || project === undefined) return null;
  return (
    <label className={styles.filter}>
      Of
      <select
        value={everywhere ? "all" : "one"}
        onChange={(event) => onChange(event.target.value === "all" ? true : undefined)}
      >
        <option value="one">{project}</option>
        <option value="all">every project</option>
      </select>
    </label>
  );
}

interface DetailsProps {
  title: string;
  children: ReactNode;
  onClose: () => void;
  /** What the closing button says. */
  close?: string;
  /** Escape does not close it: what it shows is not shown again. */
  keeps?: boolean;
}

/** One row, whole. Rendered while it is open; the browser's own dialog gives the focus back. */
export function Details({ title, children, onClose, close = "Close", keeps = false }: DetailsProps) {
  const [dialog, setDialog] = useState<HTMLDialogElement | null>(null);
  const id = useId();
  useLayoutEffect(() => {
    dialog?.showModal();
    return () => dialog?.close();
  }, [dialog]);
  return (
    <dialog
      ref={setDialog}
      className={styles.dialog}
      aria-labelledby={id}
      onCancel={(event) => {
        event.preventDefault();
        if (!keeps) onClose();
      }}
    >
      <HintPlace value={dialog}>
        <h2 id={id}>{title}</h2>
        {children}
        <p className={styles.buttons}>
          <button type="button" onClick={onClose}>
            {close}
          </button>
        </p>
      </HintPlace>
    </dialog>
  );
}

export function Facts({ children }: { children: ReactNode }) {
  return <dl className={styles.facts}>{children}</dl>;
}

export function Fact({ name, children }: { name: string; children: ReactNode }) {
  return (
    <>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </>
  );
}

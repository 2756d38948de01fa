import type { ReactNode } from "react";
import { useEffect, useId, useRef, useState } from "react";
import { useSession } from "@/api/session";
import { Dialog } from "@/components/dialog/Dialog";
import { ErrorState } from "@/components/states";
import { readMoment } from "@/format/moments";
import { refresh } from "@/live/refresh";
import styles from "./Operations.module.css";

/** For each checkbox of a group, as its ref: the browser sends the form only if one is chosen, and says why not. */
export function oneOf(chosen: readonly unknown[]) {
  return (box: HTMLInputElement | null) => box?.setCustomValidity(chosen.length === 0 ? "Choose at least one." : "");
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
        max={type === "datetime-local" ? "9999-12-31T23:59" : undefined}
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

interface PeriodProps {
  since: string | undefined;
  until: string | undefined;
  onChange: (changed: { since: string | undefined; until: string | undefined }) => void;
}

const LAST = [
  ["Last hour", 3600],
  ["Last day", 86_400],
  ["Last week", 7 * 86_400],
] as const;

/** A time: from a moment on, before another one, or what is since an hour, a day, a week. */
export function Period({ since, until, onChange }: PeriodProps) {
  return (
    <>
      <Moment label="From" value={since} onChange={(value) => onChange({ since: value, until })} />
      <Moment label="Before" value={until} onChange={(value) => onChange({ since, until: value })} />
      {LAST.map(([name, seconds]) => (
        <button
          key={name}
          type="button"
          onClick={() => onChange({ since: new Date(Date.now() - seconds * 1000).toISOString(), until: undefined })}
        >
          {name}
        </button>
      ))}
      {(since !== undefined || until !== undefined) && (
        <button type="button" onClick={() => onChange({ since: undefined, until: undefined })}>
          Any time
        </button>
      )}
    </>
  );
}

interface MomentProps {
  label: string;
  value: string | undefined;
  onChange: (value: string | undefined) => void;
}

/** Chosen in the reader's time zone; the address has UTC. */
function Moment({ label, value, onChange }: MomentProps) {
  return (
    <TextFilter
      label={label}
      type="datetime-local"
      value={value && localInput(value)}
      onChange={(typed) => onChange(typed && readMoment(typed))}
    />
  );
}

/** As an input of the type datetime-local has it. */
function localInput(moment: string): string {
  const at = new Date(moment);
  return new Date(at.getTime() - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
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
  /** No key closes it: what it shows is not shown again. */
  keeps?: boolean;
}

/** One row, whole. Rendered while it is open. */
export function Details({ title, children, onClose, close = "Close", keeps = false }: DetailsProps) {
  return (
    <Dialog title={title} onClose={onClose} keeps={keeps} wide>
      {children}
      <p className={styles.buttons}>
        <button type="button" onClick={onClose}>
          {close}
        </button>
      </p>
    </Dialog>
  );
}

import { useQueryClient } from "@tanstack/react-query";
import { type FormEvent, useEffect, useState } from "react";
import { SIGN_IN_FAILURE, sessionQuery, signIn } from "@/api/session";
import { CopyCommand } from "@/components/CopyCommand";
import { ErrorState, Loading } from "@/components/states";
import styles from "./SignIn.module.css";

/** Exchanges a token for a session. The one-time code of `holdfast ui` is exchanged before this: main.tsx. */
export function SignIn() {
  const queries = useQueryClient();
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<unknown>(() => queries.getQueryData(SIGN_IN_FAILURE) ?? null);

  useEffect(() => {
    document.title = "Sign in · Holdfast";
  }, []);

  async function submit(event: FormEvent<HTMLFormElement>) {
    event.preventDefault();
    const field = event.currentTarget.elements.namedItem("token") as HTMLInputElement;
    const token = field.value.trim();
    field.value = ""; // it is in the page no longer than this call
    setBusy(true);
    setError(null);
    try {
      queries.setQueryData(sessionQuery.queryKey, await signIn(token));
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  }

  return (
    <main className={styles.signIn}>
      <h1>Sign in to Holdfast</h1>
      <form onSubmit={submit}>
        <label htmlFor="token">Token</label>
        <input
          id="token"
          name="token"
          type="password"
          required
          autoComplete="off"
          spellCheck={false}
          placeholder="hold_…"
          disabled={busy}
        />
        <button type="submit" className="primary" disabled={busy}>
          Sign in
        </button>
      </form>
      {busy && <Loading what="the session" />}
      {error !== null && <ErrorState error={error} />}
      <p className="quiet">
        The token is exchanged for a short session in a cookie that no script can read, and is kept nowhere. The session
        may do what the token may. On the machine of a service on your own computer, this opens the page signed in:
      </p>
      <CopyCommand command="holdfast ui" label="the command that opens the page signed in" />
    </main>
  );
}

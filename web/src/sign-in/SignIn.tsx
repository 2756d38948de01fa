import { useQuery, useQueryClient } from "@tanstack/react-query";
import { type FormEvent, useEffect, useState } from "react";
import { ProblemError } from "@/api/problem";
import { beginSignIn, providersQuery, SIGN_IN_FAILURE, sessionQuery, signIn } from "@/api/session";
import { CopyCommand } from "@/components/CopyCommand";
import { ErrorState, Loading } from "@/components/states";
import styles from "./SignIn.module.css";

/** Exchanges a token for a session, or leads to a provider. What a provider or the link of `holdfast ui` has brought is
 * exchanged before this: main.tsx. `leave`: goes to another site. */
export function SignIn({ leave = (url: string) => window.location.assign(url) }) {
  const queries = useQueryClient();
  const providers = useQuery(providersQuery).data ?? [];
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

  async function goTo(provider: string, project?: string) {
    setBusy(true);
    setError(null);
    try {
      leave(await beginSignIn(provider, project));
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  }

  const choice = choiceOf(error);
  return (
    <main className={styles.signIn}>
      <h1>Sign in to Holdfast</h1>
      {providers.length > 0 && (
        <div className={styles.providers}>
          {providers.map(({ name, title }) => (
            <button key={name} type="button" className="primary" disabled={busy} onClick={() => void goTo(name)}>
              Sign in with {title}
            </button>
          ))}
        </div>
      )}
      {choice !== null && (
        <section aria-label="Choose a project" className={styles.providers}>
          <p>{choice.said}</p>
          {choice.projects.map((project) => (
            <button key={project} type="button" disabled={busy} onClick={() => void goTo(choice.provider, project)}>
              {project}
            </button>
          ))}
        </section>
      )}
      {error !== null && choice === null && <ErrorState error={error} />}
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
        <button type="submit" className={providers.length > 0 ? undefined : "primary"} disabled={busy}>
          Sign in
        </button>
      </form>
      {busy && <Loading what="the session" />}
      <p className="quiet">
        The token is exchanged for a short session in a cookie that no script can read, and is kept nowhere. The session
        may do what the token may. On the machine of a service on your own computer, this opens the page signed in:
      </p>
      <CopyCommand command="holdfast ui" label="the command that opens the page signed in" />
    </main>
  );
}

/** Of who is signed in at a provider and may work on several projects; null: the failure is another one. */
function choiceOf(error: unknown): { said: string; provider: string; projects: string[] } | null {
  if (!(error instanceof ProblemError) || error.problem.code !== "identity_project_needed") return null;
  const { provider, projects } = error.problem.context ?? {};
  if (typeof provider !== "string" || !Array.isArray(projects)) return null;
  return { said: error.problem.detail, provider, projects: projects.map(String) };
}

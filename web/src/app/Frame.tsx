import { useQuery as useSessionQuery } from "@tanstack/react-query";
import { Link, Outlet, useNavigate } from "@tanstack/react-router";
import { Suspense, useEffect, useState } from "react";
import { queryClient } from "@/api/client";
import { type Session, SessionContext, sessionQuery, signOut } from "@/api/session";
import { Hint, Hints } from "@/components/Hint";
import { ErrorState, Loading } from "@/components/states";
import { Time } from "@/components/values";
import type { Live } from "@/live/follow";
import { useLive } from "@/live/useLive";
import { SignIn } from "@/sign-in/SignIn";
import styles from "./Frame.module.css";
import { NAVIGATION } from "./navigation";
import { useProject, useProjectInAddress, useProjects } from "./project";
import { useTheme } from "./theme";

/** The sign-in screen, or the frame around the screens. */
export function Frame() {
  const session = useSessionQuery(sessionQuery);
  if (session.error && session.data === undefined) {
    return (
      <main className={styles.alone}>
        <ErrorState error={session.error} onRetry={() => void session.refetch()} />
      </main>
    );
  }
  if (session.data === undefined) return <Loading what="the session" />;
  if (session.data === null) return <SignIn />;
  return (
    // Of another session nothing stays: what is on the screen was read with the one before.
    <SessionContext value={session.data} key={session.data.csrf_token}>
      <Hints>
        <SignedIn session={session.data} failed={session.error} onRetry={() => void session.refetch()} />
      </Hints>
    </SessionContext>
  );
}

interface SignedInProps {
  session: Session;
  /** Why the last check of the session failed. The session may well be there: what is on the screen stays. */
  failed: unknown;
  onRetry: () => void;
}

function SignedIn({ session, failed, onRetry }: SignedInProps) {
  useProjectInAddress();
  const project = useProject();
  const { isPending } = useProjects();
  const live = useLive(project, project !== undefined || !isPending);
  return (
    <>
      <a className={styles.skip} href="#content">
        Skip to the content
      </a>
      <header className={styles.header}>
        <Link to="/" className={styles.name}>
          Holdfast
        </Link>
        <nav aria-label="Screens" className={styles.screens}>
          {NAVIGATION.map(({ to, label }) => (
            <Link key={to} to={to} activeOptions={{ exact: to === "/", includeSearch: false }}>
              {label}
            </Link>
          ))}
        </nav>
        <div className={styles.tools}>
          <ProjectPicker project={project} />
          <LiveSign live={live} />
          <ThemeToggle />
          <SignedInAs session={session} />
        </div>
      </header>
      <main id="content" className={styles.content} tabIndex={-1}>
        {failed !== null && <ErrorState error={failed} onRetry={onRetry} />}
        <Suspense fallback={<Loading what="the screen" />}>
          <Outlet />
        </Suspense>
      </main>
    </>
  );
}

function ProjectPicker({ project }: { project: string | undefined }) {
  const projects = useProjects();
  const navigate = useNavigate();
  const names = (projects.data?.items ?? []).map((each) => each.name);
  const offered = project === undefined || names.includes(project) ? names : [project, ...names];
  return (
    <label className={styles.picker}>
      Project{" "}
      <select
        value={project ?? ""}
        onChange={(event) => void navigate({ to: ".", search: (old) => ({ ...old, project: event.target.value }) })}
      >
        {project === undefined && <option value="">none yet</option>}
        {offered.map((name) => (
          <option key={name}>{name}</option>
        ))}
      </select>
    </label>
  );
}

const LIVE_WORDS: Record<Live, string> = {
  connecting: "Connecting to the event stream.",
  on: "Live: what changes in the service is shown at once.",
  off: "Not live: the event stream is closed. The page tries again by itself, and then shows what is new.",
};

function LiveSign({ live }: { live: Live }) {
  return (
    <Hint text={LIVE_WORDS[live]}>
      {/* biome-ignore lint/a11y/noNoninteractiveTabindex: the hint is for the keyboard too. */}
      <span role="status" tabIndex={0} className={`${styles.live} ${styles[live]}`}>
        {live === "on" ? "Live" : live === "off" ? "Not live" : "Connecting"}
      </span>
    </Hint>
  );
}

function ThemeToggle() {
  const [theme, setTheme] = useTheme();
  const other = theme === "dark" ? "light" : "dark";
  return (
    <button type="button" onClick={() => setTheme(other)} aria-label={`Show the page ${other}`}>
      <span aria-hidden="true">{theme === "dark" ? "☀" : "☾"}</span>
    </button>
  );
}

function SignedInAs({ session }: { session: Session }) {
  const [error, setError] = useState<unknown>(null);

  async function leave() {
    try {
      await signOut(session);
      queryClient.setQueryData(sessionQuery.queryKey, null);
    } catch (failure) {
      setError(failure);
    }
  }

  // The service ends the session by itself: the page does not wait for a call that is refused.
  useEffect(() => {
    const milliseconds = Date.parse(session.expires_at) - Date.now();
    const timer = window.setTimeout(
      () => void queryClient.invalidateQueries({ queryKey: sessionQuery.queryKey }),
      Math.min(Math.max(milliseconds, 0) + 1000, 2 ** 31 - 1),
    );
    return () => window.clearTimeout(timer);
  }, [session.expires_at]);

  return (
    <details className={styles.who}>
      <summary>{session.name}</summary>
      <div className={styles.card}>
        <p>
          Token <strong>{session.name}</strong>, {session.project === null ? "every project" : session.project}
        </p>
        <p>
          Scopes: {session.scopes.join(", ") || "none"}
          <br />
          Until <Time at={session.expires_at} />
        </p>
        {error !== null && <ErrorState error={error} />}
        <button type="button" onClick={leave}>
          Sign out
        </button>
      </div>
    </details>
  );
}

import { type QueryClient, queryOptions } from "@tanstack/react-query";
import { createContext, useContext } from "react";
import { isSignedOut, problemOf } from "./problem";
import type { components } from "./schema";

export type Scope = components["schemas"]["Scope"];

/** Who is signed in. The cookie itself is HttpOnly: no script sees it. The CSRF token is kept in memory alone. */
export type Session = Pick<
  components["schemas"]["SessionView"],
  "name" | "project" | "scopes" | "csrf_token" | "expires_at"
>;

export const CSRF_HEADER = "X-Holdfast-CSRF";
const CURRENT = "/v1/sessions/current";

/** null: there is no session. Any other failure is thrown. */
async function currentSession(): Promise<Session | null> {
  const reply = await fetch(CURRENT);
  if (reply.status === 401) return null;
  if (!reply.ok) throw await problemOf(reply);
  return (await reply.json()) as Session;
}

export const sessionQuery = queryOptions({
  queryKey: ["session"],
  queryFn: currentSession,
  staleTime: Number.POSITIVE_INFINITY,
  // The cookie is all tabs': another one may have signed out, or in with another token.
  refetchOnWindowFocus: "always",
});

/** `secret`: a token, or a one-time code of `holdfast ui`. It goes into this one call and is kept nowhere. */
export async function signIn(secret: string): Promise<Session> {
  const reply = await fetch("/v1/sessions", { method: "POST", headers: { Authorization: `Bearer ${secret}` } });
  if (!reply.ok) throw await problemOf(reply);
  return (await reply.json()) as Session;
}

export type Provider = components["schemas"]["SignInProvider"];

export const providersQuery = queryOptions({
  queryKey: ["sign-in providers"],
  queryFn: async (): Promise<Provider[]> => {
    const reply = await fetch("/v1/sign-ins/providers");
    if (!reply.ok) throw await problemOf(reply);
    return ((await reply.json()) as components["schemas"]["SignInProviders"]).items;
  },
  staleTime: Number.POSITIVE_INFINITY,
});

const CALLBACK = "/ui/sign-in";
const CAME_FROM = "holdfast-came-from";
const HOME = "/ui/";

async function postJson<Reply>(path: string, body: object): Promise<Reply> {
  const init = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const reply = await fetch(path, init);
  if (!reply.ok) throw await problemOf(reply);
  return (await reply.json()) as Reply;
}

/** The address at the provider where the person signs in. Afterwards the page is where it is now. */
export async function beginSignIn(provider: string, project?: string): Promise<string> {
  const body = { provider, ...(project === undefined ? {} : { project }) };
  const { url } = await postJson<components["schemas"]["SignInBegun"]>("/v1/sign-ins", body);
  const { pathname, search } = window.location;
  if (pathname !== CALLBACK) sessionStorage.setItem(CAME_FROM, pathname + search);
  return url;
}

/** Takes the provider's answer out of the address bar and the history, and leads back to where the person was; null: no
 * provider sent the browser here. */
export function takeAnswer(place: Location = window.location): Record<string, string> | null {
  if (place.pathname !== CALLBACK) return null;
  const said = new URLSearchParams(place.search);
  // Only a path of this page is kept, and the browser takes no address of another origin here.
  const from = sessionStorage.getItem(CAME_FROM) ?? HOME;
  sessionStorage.removeItem(CAME_FROM);
  window.history.replaceState(window.history.state, "", from.startsWith(HOME) ? from : HOME);
  const state = said.get("state");
  if (state === null) return null;
  const answer: Record<string, string> = { state };
  for (const [theirs, ours] of Object.entries({
    code: "code",
    error: "error",
    error_description: "error_description",
    iss: "issuer",
  })) {
    const value = said.get(theirs);
    if (value !== null) answer[ours] = value;
  }
  return answer;
}

/** Why the code of a link, or the answer of a provider, opened no session; the sign-in screen shows it. */
export const SIGN_IN_FAILURE = ["sign-in failure"];

/** The session that a one-time code opens, or the answer of a provider. After one that is used or over: the session that
 * is there already. */
export function openBy(queries: QueryClient, what: string | Record<string, string>): void {
  async function open(): Promise<Session | null> {
    try {
      return typeof what === "string" ? await signIn(what) : await postJson<Session>("/v1/sign-ins/finish", what);
    } catch (failure) {
      queries.setQueryData(SIGN_IN_FAILURE, failure);
      return currentSession();
    }
  }
  void queries.prefetchQuery({ ...sessionQuery, queryFn: open });
}

export async function signOut(session: Session): Promise<void> {
  const reply = await fetch(CURRENT, { method: "DELETE", headers: { [CSRF_HEADER]: session.csrf_token } });
  if (reply.ok) return;
  const problem = await problemOf(reply);
  if (!isSignedOut(problem)) throw problem;
}

/** Given by the frame to all that stands in it. */
export const SessionContext = createContext<Session | null>(null);

/** Inside the frame, where there is a session. */
export function useSession(): Session {
  const session = useContext(SessionContext);
  if (session === null) throw new Error("There is no session: the frame shows the sign-in screen instead.");
  return session;
}

/** Takes the code out of `/ui/#code=…` and out of the address bar and the history; null: there is none. */
export function takeCode(place: Location = window.location): string | null {
  const code = new URLSearchParams(place.hash.replace(/^#/, "")).get("code");
  if (code === null) return null;
  window.history.replaceState(window.history.state, "", place.pathname + place.search);
  return code;
}

import { QueryClientProvider } from "@tanstack/react-query";
import { createMemoryHistory, RouterProvider } from "@tanstack/react-router";
import { render } from "@testing-library/react";
import type { ReactElement } from "react";
import { queryClient } from "@/api/client";
import { type Session, SessionContext, sessionQuery } from "@/api/session";
import { makeRouter } from "@/app/routes";
import { Hints } from "@/components/Hint";

export const SESSION: Session = {
  name: "ops",
  project: null,
  scopes: ["read", "operate"],
  csrf_token: "csrf",
  expires_at: "2999-01-01T00:00:00Z",
};

/** A component as it stands in the page, with a session. */
export function renderSignedIn(element: ReactElement, session: Partial<Session> = {}) {
  queryClient.clear();
  queryClient.setQueryData(sessionQuery.queryKey, { ...SESSION, ...session });
  return render(signedIn(element, session));
}

/** The same, to render it again. */
export function signedIn(element: ReactElement, session: Partial<Session> = {}) {
  return (
    <QueryClientProvider client={queryClient}>
      <SessionContext value={{ ...SESSION, ...session }}>
        <Hints>{element}</Hints>
      </SessionContext>
    </QueryClientProvider>
  );
}

class SilentEventSource extends EventTarget {
  static CLOSED = 2;
  readyState = 0;
  close() {}
}

/** The whole page at an address. No event comes. */
export function openPage(address: string) {
  vi.stubGlobal("EventSource", SilentEventSource);
  queryClient.clear();
  const router = makeRouter();
  router.update({ ...router.options, history: createMemoryHistory({ initialEntries: [address] }) } as never);
  render(
    <QueryClientProvider client={queryClient}>
      <RouterProvider router={router} />
    </QueryClientProvider>,
  );
  return router;
}

type Answer = (request: Request) => unknown | Response;

/** An event stream on which nothing comes. */
const silence: Answer = () => new Response(new ReadableStream());

/** Answers the page's calls in place of a service: by "GET /v1/…", the query left out. Returns the requests. */
export function serve(answers: Record<string, Answer>): Request[] {
  const asked: Request[] = [];
  vi.stubGlobal("fetch", async (input: RequestInfo | URL, init?: RequestInit) => {
    const request =
      input instanceof Request ? input : new Request(new URL(String(input), window.location.origin), init);
    asked.push(request);
    const call = `${request.method} ${new URL(request.url).pathname}`;
    const answer = answers[call] ?? (call === "GET /v1/events/stream" ? silence : undefined);
    if (answer === undefined) throw new Error(`The test answers no ${call}.`);
    const found = await answer(request);
    return found instanceof Response ? found : Response.json(found);
  });
  return asked;
}

/** As the service says what went wrong. `context`: its facts for programs. */
export function problem(status: number, code: string, detail: string, context: object = {}): Response {
  const body = {
    type: "about:blank",
    title: code,
    status,
    code,
    detail,
    context,
    retryable: false,
    request_id: "req-1",
  };
  return Response.json(body, { status, headers: { "Content-Type": "application/problem+json" } });
}

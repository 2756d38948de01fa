import { QueryObserver } from "@tanstack/react-query";
import { problem, SESSION, serve } from "@/testing/page";
import { api, queryClient } from "./client";
import { sessionQuery } from "./session";

const OF_OTHERS = ["get", "/v1/projects", {}];
const sign = (session: typeof SESSION | null) => queryClient.setQueryData(sessionQuery.queryKey, session);

beforeEach(() => {
  sign(null);
  queryClient.clear();
});

it.each([
  ["a sign-out", null],
  ["another session", { ...SESSION, name: "reader", csrf_token: "other" }],
])("drops what was read before %s", (_what, next) => {
  sign(SESSION);
  queryClient.setQueryData(OF_OTHERS, { items: ["secret"] });
  sign(next);
  expect(queryClient.getQueryData(OF_OTHERS)).toBeUndefined();
});

it("keeps what was read while the session stays, also when it is asked for again", () => {
  sign(SESSION);
  queryClient.setQueryData(OF_OTHERS, { items: ["mine"] });
  sign({ ...SESSION, expires_at: "2999-02-02T00:00:00Z" });
  expect(queryClient.getQueryData(OF_OTHERS)).toEqual({ items: ["mine"] });
});

it("drops what was read when the service says that the session has ended", async () => {
  sign(SESSION);
  queryClient.setQueryData(OF_OTHERS, { items: ["secret"] });
  serve({ "GET /v1/workers": () => problem(401, "unauthenticated", "The session has ended.") });
  const call = queryClient.fetchQuery({ queryKey: ["workers"], queryFn: () => api.GET("/v1/workers"), retry: false });
  await expect(call).rejects.toThrow("The session has ended.");
  expect(queryClient.getQueryData(sessionQuery.queryKey)).toBeNull();
  expect(queryClient.getQueryData(OF_OTHERS)).toBeUndefined();
});

it("sends the CSRF token of the session that there is, and none without one", async () => {
  const path = { params: { path: { project: "demo" } } };
  const asked = serve({ "POST /v1/projects/demo/undelete": () => ({}) });
  sign(SESSION);
  await api.POST("/v1/projects/{project}/undelete", path);
  sign(null);
  await api.POST("/v1/projects/{project}/undelete", path);
  sign({ ...SESSION, csrf_token: "other" });
  await api.POST("/v1/projects/{project}/undelete", path);
  expect(asked.map((each) => each.headers.get("X-Holdfast-CSRF"))).toEqual(["csrf", null, "other"]);
});

it("asks which session the cookie is of when the service refuses its CSRF token", async () => {
  sign(SESSION);
  onTestFinished(new QueryObserver(queryClient, sessionQuery).subscribe(() => undefined)); // as the frame does
  queryClient.setQueryData(OF_OTHERS, { items: ["secret"] });
  serve({
    "POST /v1/projects/demo/undelete": () => problem(403, "csrf_failed", "The header is of another session."),
    "GET /v1/sessions/current": () => ({ ...SESSION, name: "reader", csrf_token: "other" }),
  });
  const call = api.POST("/v1/projects/{project}/undelete", { params: { path: { project: "demo" } } });
  await expect(call).rejects.toThrow("another session");
  await vi.waitFor(() => expect(queryClient.getQueryData(OF_OTHERS)).toBeUndefined());
});

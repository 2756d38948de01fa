import { QueryClientProvider } from "@tanstack/react-query";
import { createMemoryHistory, RouterProvider } from "@tanstack/react-router";
import { act, render, screen, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { queryClient } from "@/api/client";
import { takeCode } from "@/api/session";
import { problem, SESSION, serve } from "@/testing/page";
import { makeRouter } from "./routes";

const PROJECT = {
  id: "1",
  name: "demo",
  created_at: "2026-01-01T00:00:00Z",
  quota_bytes: null,
  quota_used_bytes: 0,
  stored_bytes: 0,
  runs: 1,
};
const RUN = {
  id: "r1",
  project: "demo",
  name: "llama",
  created_at: "2026-01-01T00:00:00Z",
  latest_attempt: 2,
  status: "failed",
  status_detail: "rank 3: RuntimeError: ECC",
  last_heard_at: new Date().toISOString(),
  committed_checkpoints: 5,
  newest_step: 50,
  restore_point: null,
};
const page = (...items: unknown[]) => ({ items, next_cursor: null });
const ANSWERS = {
  "GET /v1/sessions/current": () => SESSION,
  "GET /v1/projects": () => page(PROJECT),
  "GET /v1/projects/demo": () => PROJECT,
  "GET /v1/projects/demo/runs": (request: Request) =>
    new URL(request.url).searchParams.getAll("status").includes("failed") ? page(RUN) : page(),
  "GET /v1/projects/demo/runs/llama/goodput": () => ({ goodput: 0.923 }),
  "GET /v1/projects/demo/bad-copies": () => page(),
  "GET /v1/projects/demo/checkpoints": () => page(),
  "GET /v1/events": () => page(),
  "GET /v1/stores": () => page(),
  "GET /v1/projects/demo/copies": () => page(),
  "GET /v1/operations": () => page(),
  "GET /v1/controllers": () => page(),
  "GET /v1/projects/demo/usage": () => problem(403, "forbidden", "The token may not read usage."),
  "GET /v1/projects/demo/samples": () => page(),
  "GET /v1/projects/demo/cost": () => ({ per_month: 12.5, currency: "USD", as_of: "2026-01-01", unpriced_bytes: 0 }),
};

function open(address: string) {
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

it("tells what needs attention, and each part that fails by itself", async () => {
  serve(ANSWERS);
  open("/ui/");
  const attention = await screen.findByRole("region", { name: "Needs attention" });
  expect(await within(attention).findByText("rank 3: RuntimeError: ECC")).toBeVisible();
  expect(await screen.findByText("12.50 USD")).toBeVisible();
  expect(screen.getByText("Prices as of 2026-01-01")).toBeVisible();
  expect(await screen.findByRole("alert")).toHaveTextContent("The token may not read usage.");
  expect(screen.getByText("No run is training")).toBeVisible();
});

it("keeps the project and the filter in the address, and gives the focus to the new screen", async () => {
  serve(ANSWERS);
  const router = open("/ui/?project=demo");
  await userEvent.click(await screen.findByRole("link", { name: "Runs" }));
  expect(await screen.findByRole("heading", { name: "Runs" })).toHaveFocus();
  await userEvent.selectOptions(screen.getByLabelText("Status"), "failed");
  expect(await screen.findByText("llama")).toBeVisible();
  expect(await screen.findByText("92.3 %")).toBeVisible();
  expect(router.state.location.search).toEqual({ project: "demo", status: "failed" });
});

it("keeps the project of an address that named none when another one becomes the first", async () => {
  const projects = [PROJECT];
  serve({ ...ANSWERS, "GET /v1/projects": () => page(...projects) });
  const router = open("/ui/runs?status=failed");
  expect(await screen.findByText("llama")).toBeVisible();
  projects.unshift({ ...PROJECT, id: "2", name: "audio" });
  await queryClient.invalidateQueries();
  expect(await screen.findByRole("option", { name: "audio" })).toBeInTheDocument();
  expect(screen.getByLabelText("Project")).toHaveValue("demo");
  expect(screen.getByText("llama")).toBeVisible();
  expect(router.state.location.search).toEqual({ project: "demo", status: "failed" });
});

it("leaves an address where nothing is as it was typed", async () => {
  serve({ ...ANSWERS, "GET /v1/projects": () => page(PROJECT) });
  const router = open("/ui/nowhere");
  expect(await screen.findByRole("option", { name: "demo" })).toBeInTheDocument();
  expect(await screen.findByRole("heading", { name: "Nothing is here" })).toBeVisible();
  expect(router.state.location.pathname).toContain("nowhere");
});

it("narrows the runs to a tag, which stands in the address", async () => {
  const tagged = { ...RUN, tags: ["paper", "7"] };
  const tag = (request: Request) => new URL(request.url).searchParams.get("tag");
  serve({
    ...ANSWERS,
    "GET /v1/projects/demo/runs": (request: Request) =>
      [null, ...tagged.tags].includes(tag(request)) ? page(tagged) : page(),
  });
  const router = open("/ui/runs?project=demo");
  await userEvent.click(await screen.findByRole("link", { name: "7" }));
  expect(router.state.location.search).toEqual({ project: "demo", tag: "7" });
  expect(await screen.findByLabelText("Tag")).toHaveValue("7");
  await userEvent.clear(screen.getByLabelText("Tag"));
  await userEvent.type(screen.getByLabelText("Tag"), "draft{Enter}");
  expect(await screen.findByText("No run has the tag draft")).toBeVisible();
  expect(router.state.location.search).toEqual({ project: "demo", tag: "draft" });
});

it("signs in by a token, which stays nowhere, and out again with the CSRF header", async () => {
  let signedIn = false;
  const unknown = () => problem(401, "unauthenticated", "This token is not known. Ask for a new one.");
  const asked = serve({
    ...ANSWERS,
    "GET /v1/sessions/current": () => (signedIn ? SESSION : unknown()),
    "POST /v1/sessions": (request: Request) => {
      signedIn = request.headers.get("Authorization") === "Bearer hold_a_b";
      return signedIn ? SESSION : unknown();
    },
    "DELETE /v1/sessions/current": () => new Response(null, { status: 204 }),
  });
  open("/ui/");
  const field = await screen.findByLabelText("Token");
  await userEvent.type(field, "wrong{Enter}");
  expect(await screen.findByRole("alert")).toHaveTextContent("Ask for a new one.");
  expect(field).toHaveValue("");
  await userEvent.type(field, " hold_a_b {Enter}");
  await userEvent.click(await screen.findByText("ops", { selector: "summary" }));
  act(() => screen.getByText(/2999|3000/, { selector: "time" }).focus());
  expect(await screen.findByRole("tooltip")).toHaveTextContent("2999-01-01 00:00:00 UTC");
  await userEvent.click(screen.getByRole("button", { name: "Sign out" }));
  expect(await screen.findByLabelText("Token")).toBeVisible();
  expect(asked.find((each) => each.method === "DELETE")?.headers.get("X-Holdfast-CSRF")).toBe("csrf");
  expect([localStorage.length, sessionStorage.getItem("token")]).toEqual([0, null]);
});

it("shows the sign-in screen when a session has ended meanwhile", async () => {
  serve({ ...ANSWERS, "GET /v1/projects": () => problem(401, "unauthenticated", "The session has ended.") });
  open("/ui/");
  expect(await screen.findByLabelText("Token")).toBeVisible();
});

it("takes a one-time code out of the address at once", () => {
  window.history.replaceState(null, "", "/ui/?project=demo#code=abc");
  expect(takeCode()).toBe("abc");
  expect(window.location.href).toMatch(/\/ui\/\?project=demo$/);
  expect(takeCode()).toBeNull();
});

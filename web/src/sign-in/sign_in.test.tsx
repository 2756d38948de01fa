import { QueryClientProvider } from "@tanstack/react-query";
import { render, screen } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { queryClient } from "@/api/client";
import { openBy, SIGN_IN_FAILURE, sessionQuery, takeAnswer } from "@/api/session";
import { problem, SESSION, serve } from "@/testing/page";
import { SignIn } from "./SignIn";

const CORP = { name: "corp", title: "Corp", issuer: "https://id.example", device_client_id: null, scopes: ["openid"] };
const GO = "https://id.example/auth?state=s";

beforeEach(() => {
  queryClient.clear();
  sessionStorage.clear();
  window.history.replaceState(null, "", "/ui/runs?project=demo");
});

function show(leave = vi.fn()) {
  render(
    <QueryClientProvider client={queryClient}>
      <SignIn leave={leave} />
    </QueryClientProvider>,
  );
  return leave;
}

it("leads to the provider that the person chooses, and back to where the person was", async () => {
  const asked = serve({
    "GET /v1/sign-ins/providers": () => ({ items: [CORP] }),
    "POST /v1/sign-ins": () => ({ url: GO }),
  });
  const leave = show();
  await userEvent.click(await screen.findByRole("button", { name: "Sign in with Corp" }));
  await vi.waitFor(() => expect(leave).toHaveBeenCalledWith(GO));
  expect(await asked.at(-1)?.json()).toEqual({ provider: "corp" });
  window.history.replaceState(null, "", "/ui/sign-in?code=c&state=s&iss=https%3A%2F%2Fid.example");
  expect(takeAnswer()).toEqual({ state: "s", code: "c", issuer: "https://id.example" });
  expect(window.location.pathname + window.location.search).toBe("/ui/runs?project=demo");
  expect(sessionStorage.length).toBe(0);
});

it("offers a token alone where there is no provider, or none is told", async () => {
  serve({ "GET /v1/sign-ins/providers": () => problem(503, "busy", "Later.") });
  show();
  expect(await screen.findByLabelText("Token")).toBeVisible();
  expect(screen.queryByRole("alert")).toBeNull();
  expect(screen.getAllByRole("button")[0]).toHaveTextContent("Sign in");
});

it("says why nobody was signed in, and lets who may work on several projects choose one", async () => {
  const told = { provider: "corp", projects: ["demo", "other"] };
  serve({
    "GET /v1/sign-ins/providers": () => ({ items: [CORP] }),
    "POST /v1/sign-ins": () => ({ url: GO }),
    "POST /v1/sign-ins/finish": () =>
      problem(409, "identity_project_needed", "You are signed in at Corp as Bo. Choose one.", told),
    "GET /v1/sessions/current": () => problem(401, "unauthenticated", "No session."),
  });
  openBy(queryClient, { state: "s", code: "c" });
  await vi.waitFor(() => expect(queryClient.getQueryData(SIGN_IN_FAILURE)).toBeDefined());
  const leave = show();
  expect(await screen.findByText(/signed in at Corp as Bo/)).toBeVisible();
  await userEvent.click(screen.getByRole("button", { name: "other" }));
  await vi.waitFor(() => expect(leave).toHaveBeenCalledWith(GO));
});

it("opens the session of what a provider sent back", async () => {
  const asked = serve({ "POST /v1/sign-ins/finish": () => SESSION });
  openBy(queryClient, { state: "s", code: "c" });
  await vi.waitFor(() => expect(queryClient.getQueryData(sessionQuery.queryKey)).toEqual(SESSION));
  expect(await asked[0]?.json()).toEqual({ state: "s", code: "c" });
});

it.each([
  ["/ui/sign-in", "https://evil.example/"],
  ["/ui/sign-in?code=c", "//evil.example"],
  ["/ui/sign-in", null],
])("keeps to its own addresses: %s from %s", (address, from) => {
  if (from !== null) sessionStorage.setItem("holdfast-came-from", from);
  window.history.replaceState(null, "", address);
  expect(takeAnswer()).toBeNull();
  expect(window.location.pathname).toBe("/ui/");
});

it("takes nothing from any other place", () => {
  window.history.replaceState(null, "", "/ui/runs?code=c&state=s");
  expect(takeAnswer()).toBeNull();
  expect(window.location.search).toBe("?code=c&state=s");
});

import { problem } from "@/testing/page";
import { follow } from "./follow";

/** The calls of a follower, and the stream that each was answered with. */
interface Call {
  headers: Headers;
  signal: AbortSignal;
  send: (text: string) => void;
  end: () => void;
}

let visibility = "visible";
Object.defineProperty(document, "visibilityState", { configurable: true, get: () => visibility });

function show(state: "visible" | "hidden") {
  visibility = state;
  document.dispatchEvent(new Event("visibilitychange"));
}

const event = (number: number) => `id: 1-${number}\nevent: run.stalled\ndata: {"id":"1-${number}"}\n\n`;
const later = (milliseconds = 0) => vi.advanceTimersByTimeAsync(milliseconds);

function start(refusals: Response[] = []) {
  const calls: Call[] = [];
  vi.stubGlobal("fetch", async (_address: string, init: { headers: HeadersInit; signal: AbortSignal }) => {
    let controller: ReadableStreamDefaultController<Uint8Array> | undefined;
    const body = new ReadableStream<Uint8Array>({
      start(given) {
        controller = given;
        init.signal.addEventListener("abort", () => given.error(new DOMException("", "AbortError")));
      },
    });
    calls.push({
      headers: new Headers(init.headers),
      signal: init.signal,
      send: (text) => controller?.enqueue(new TextEncoder().encode(text)),
      end: () => controller?.close(),
    });
    return refusals.shift() ?? new Response(body);
  });
  const seen: string[] = [];
  const told = { gaps: 0, signedOut: 0, states: [] as string[] };
  const end = follow("p", {
    onState: (state) => told.states.push(state),
    onEvent: ({ id }) => seen.push(id),
    onGap: () => {
      told.gaps += 1;
    },
    onSignedOut: () => {
      told.signedOut += 1;
    },
  });
  onTestFinished(end);
  const last = () => calls.at(-1) as Call;
  return { calls, last, seen, told, end };
}

beforeEach(() => {
  vi.useFakeTimers();
  visibility = "visible";
});
afterEach(() => {
  vi.useRealTimers();
});

const refusal = (retryAfter: string) => {
  const reply = problem(429, "rate_limited", "Too many streams.");
  reply.headers.set("Retry-After", retryAfter);
  return reply;
};

it("goes on from the last event when the stream has ended, and misses none", async () => {
  const { calls, last, seen, told } = start();
  await later();
  last().send(`retry: 2000\nid: 1-4\n\n${event(5).slice(0, 20)}`);
  last().send(event(5).slice(20) + event(6));
  await later();
  last().end();
  await later(2000);
  expect(calls).toHaveLength(2);
  expect(last().headers.get("Last-Event-ID")).toBe("1-6");
  last().send(event(7));
  await later();
  expect(seen).toEqual(["1-5", "1-6", "1-7"]);
  expect(told.gaps).toBe(0);
});

it("holds no connection while the tab is out of sight, and catches up by the last event", async () => {
  const { calls, last, told } = start();
  await later();
  last().send(event(5));
  await later();
  show("hidden");
  await later(60_000);
  expect(calls).toHaveLength(1);
  expect(last().signal.aborted).toBe(true);
  show("visible");
  await later();
  expect(calls).toHaveLength(2);
  expect(last().headers.get("Last-Event-ID")).toBe("1-5");
  expect(told.gaps).toBe(0);
});

it("opens none in a tab that was never in sight", async () => {
  visibility = "hidden";
  const { calls } = start();
  await later(60_000);
  expect(calls).toEqual([]);
});

it("asks once for everything after a long time out of sight, in place of all the events", async () => {
  const { last, told } = start();
  await later();
  last().send(event(5));
  await later();
  show("hidden");
  await later(600_000);
  show("visible");
  await later();
  expect(last().headers.has("Last-Event-ID")).toBe(false);
  last().send("id: 1-90\n\n");
  last().send(event(91));
  await later();
  expect(told.gaps).toBe(1);
});

it("comes again when the service allows it, and asks for everything once, when it is live", async () => {
  const { calls, last, told } = start([refusal("40"), refusal("40")]);
  await later(39_000);
  expect(calls).toHaveLength(1);
  expect(told.states.at(-1)).toBe("off");
  await later(2000);
  expect(calls).toHaveLength(2);
  expect(told.gaps).toBe(0);
  await later(41_000);
  expect(calls).toHaveLength(3);
  last().send("id: 1-90\n\n");
  await later();
  expect(told).toMatchObject({ gaps: 1, signedOut: 0 });
  expect(told.states.at(-1)).toBe("on");
});

it("asks less and less often where the service does not say when", async () => {
  const busy = () => problem(503, "busy", "Too many calls are under way.");
  const { calls } = start([busy(), busy(), busy(), busy(), busy(), busy(), busy(), busy()]);
  await later(120_000);
  expect(calls.length).toBeLessThanOrEqual(8);
});

it("begins anew when its events are forgotten", async () => {
  const { calls, last, told } = start();
  await later();
  last().send(event(5));
  await later();
  vi.stubGlobal(
    "fetch",
    vi.fn(async () => problem(410, "events_forgotten", "These events are not known any more.")),
  );
  last().end();
  await later(2000);
  expect(vi.mocked(fetch).mock.calls[0]?.[1]?.headers).toEqual({ "Last-Event-ID": "1-5" });
  await later(4000);
  expect(vi.mocked(fetch).mock.calls[1]?.[1]?.headers).toEqual({});
  expect([calls.length, told.gaps]).toEqual([1, 0]);
});

it("leaves a connection on which nothing comes any more", async () => {
  const { calls } = start();
  await later();
  await later(65_000);
  expect(calls.length).toBeGreaterThan(1);
});

it("asks for the session when the service knows none, and does not ask on", async () => {
  const { calls, told } = start([problem(401, "unauthenticated", "The session has ended.")]);
  await later(50_000);
  expect(calls).toHaveLength(1);
  expect(told.signedOut).toBe(1);
});

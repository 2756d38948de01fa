import type { components } from "./schema";

export type Problem = components["schemas"]["Problem"];

/** A reply of the service that is no success. Its message is the service's own sentence, with the remedy. */
export class ProblemError extends Error {
  override name = "ProblemError";
  constructor(readonly problem: Problem) {
    super(problem.detail);
  }
}

/** The failure as the page shows it. `code`: for programs, and for a search in the docs; null if no service answered. */
export interface Failure {
  title: string;
  detail: string;
  code: string | null;
  requestId: string | null;
}

export function failureOf(error: unknown): Failure {
  if (error instanceof ProblemError) {
    const { title, detail, code, request_id } = error.problem;
    return { title, detail, code, requestId: request_id };
  }
  // What fetch throws without a reply; its own message differs from browser to browser.
  if (error instanceof TypeError) {
    const detail = "The service gave no answer. Look whether it runs and whether this machine reaches it, then retry.";
    return { title: "No connection", detail, code: null, requestId: null };
  }
  const detail = error instanceof Error ? error.message : String(error);
  return { title: "The page failed", detail, code: null, requestId: null };
}

/** The problem that a reply tells; one is made for a proxy's error page. */
export async function problemOf(reply: Response): Promise<ProblemError> {
  const isProblem = reply.headers.get("Content-Type")?.startsWith("application/problem+json") ?? false;
  if (isProblem) return new ProblemError((await reply.json()) as Problem);
  return new ProblemError({
    type: "about:blank",
    title: reply.statusText || `Status ${reply.status}`,
    status: reply.status,
    code: `http_${reply.status}`,
    detail: `What stands between this page and the service answered with status ${reply.status}. Retry, or look at the proxy's log.`,
    retryable: reply.status >= 500,
    request_id: reply.headers.get("X-Request-Id") ?? "",
  });
}

export function isSignedOut(error: unknown): boolean {
  return error instanceof ProblemError && error.problem.status === 401;
}

/** Another person was faster: the version that the call named is not the newest any more (412), or the call named none,
 * and there is one by now (428). */
export function isEditConflict(error: unknown): boolean {
  return error instanceof ProblemError && (error.problem.status === 412 || error.problem.status === 428);
}

/** What was asked about is not there any more. */
export function isGone(error: unknown): boolean {
  return error instanceof ProblemError && (error.problem.status === 404 || error.problem.status === 410);
}

/** The service refused what was asked, for example because there is too little to answer from. */
export function isInvalid(error: unknown): boolean {
  return error instanceof ProblemError && error.problem.code === "invalid_request";
}

/** The same call may succeed later without any change. */
export function isRetryable(error: unknown): boolean {
  return error instanceof ProblemError ? error.problem.retryable : error instanceof TypeError;
}

import { QueryCache, QueryClient, useInfiniteQuery } from "@tanstack/react-query";
import createFetch from "openapi-fetch";
import createQueries from "openapi-react-query";
import { isRetryable, isSignedOut, problemOf } from "./problem";
import type { components, paths } from "./schema";
import { CSRF_HEADER, type Session, sessionQuery } from "./session";

export type Schemas = components["schemas"];

const READS = new Set(["GET", "HEAD"]);
const MOST_RETRIES = 3;

export const queryClient = new QueryClient({
  defaultOptions: {
    queries: {
      // Live events say what has changed; this bounds how old a screen can be without them.
      staleTime: 10_000,
      retry: (failures, error) => failures < MOST_RETRIES && isRetryable(error),
    },
  },
  queryCache: new QueryCache({
    // The session has ended or its token was revoked: the frame shows the sign-in screen.
    onError: (error) => {
      if (isSignedOut(error)) queryClient.setQueryData(sessionQuery.queryKey, null);
    },
  }),
});

const isOfSession = (key: readonly unknown[]) => key[0] === sessionQuery.queryKey[0];
let csrfToken: string | null = null;

/** With each change of the session (sign-in, sign-out, its end, another one from another tab) everything that was read
 * before is dropped: the next one who signs in here may see less. */
queryClient.getQueryCache().subscribe(({ type, query }) => {
  if (type !== "updated" || !isOfSession(query.queryKey)) return;
  const session = query.state.data as Session | null | undefined;
  const token = session?.csrf_token ?? null;
  if (token === csrfToken) return;
  csrfToken = token;
  queryClient.removeQueries({ predicate: ({ queryKey }) => !isOfSession(queryKey) });
  queryClient.getMutationCache().clear();
});

/** One call of the API, typed by path and method; for what is no hook. Throws `ProblemError` for each reply that is no
 * success. */
export const api = createFetch<paths>({
  baseUrl: window.location.origin,
  // Looked up with each call, so that a test can put a service in its place.
  fetch: (request) => globalThis.fetch(request),
});

api.use({
  onRequest({ request }) {
    const session = queryClient.getQueryData<Session | null>(sessionQuery.queryKey);
    if (session && !READS.has(request.method)) request.headers.set(CSRF_HEADER, session.csrf_token);
    return request;
  },
  async onResponse({ response }) {
    if (response.ok) return;
    const problem = await problemOf(response);
    // The cookie is of another session than the one that this page knows.
    if (problem.problem.code === "csrf_failed") void queryClient.invalidateQueries({ queryKey: sessionQuery.queryKey });
    throw problem;
  },
});

/** `useQuery("get", path, { params })` and `useMutation("post", path)`. Keys are `[method, path, init]`: see
 * live/touches.ts. */
export const { useQuery, useMutation, queryOptions } = createQueries(api);

interface PageOf<Item> {
  items: Item[];
  next_cursor?: string | null;
}

type Params = { path?: Record<string, string | number>; query?: Record<string, unknown> };

/** The paths whose GET gives a page. */
export type PagedPath = {
  [Path in keyof paths]: paths[Path] extends {
    get: { responses: { 200: { content: { "application/json": PageOf<unknown> } } } };
  }
    ? Path
    : never;
}[keyof paths];

export type ItemOf<Path extends PagedPath> = paths[Path] extends {
  get: { responses: { 200: { content: { "application/json": PageOf<infer Item> } } } };
}
  ? Item
  : never;

export type ParamsOf<Path extends PagedPath> = paths[Path] extends { get: { parameters: infer Given } }
  ? Omit<Given, "query" | "path" | "header" | "cookie"> &
      (Given extends { path: infer InPath } ? { path: InPath } : { path?: undefined }) &
      (Given extends { query?: infer InQuery }
        ? { query?: Omit<NonNullable<InQuery>, "cursor"> }
        : { query?: undefined })
  : never;

export interface Pages<Item> {
  items: Item[];
  /** The first page is on its way. */
  isPending: boolean;
  /** Of the first page, or of the one that was asked for last. */
  error: unknown;
  hasMore: boolean;
  isLoadingMore: boolean;
  loadMore: () => void;
  retry: () => void;
}

interface PagesOptions<Item> {
  enabled?: boolean;
  /** After how many milliseconds the pages that were read are asked for again, while the tab is in sight: for what no
   * event tells. False: not again. */
  askedAgainAfter?: (items: readonly Item[]) => number | false;
}

/** A list that is read page by page, as it is scrolled: the items of all pages that were read. */
export function usePages<Path extends PagedPath>(
  path: Path,
  params: ParamsOf<Path>,
  { enabled = true, askedAgainAfter }: PagesOptions<ItemOf<Path>> = {},
): Pages<ItemOf<Path>> {
  const found = useInfiniteQuery({
    queryKey: ["get", path, { params }, "pages"],
    queryFn: async ({ pageParam, signal }) => {
      const given = params as Params;
      const query = { ...given.query, ...(pageParam === null ? {} : { cursor: pageParam }) };
      // The types of openapi-fetch want one path, not one of many; PagedPath has made sure of it.
      const get = api.GET as unknown as (path: string, init: object) => Promise<{ data: PageOf<ItemOf<Path>> }>;
      return (await get(path, { params: { ...given, query }, signal })).data;
    },
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next_cursor ?? null,
    select: (data) => data.pages.flatMap((page) => page.items),
    enabled,
    refetchInterval: ({ state }) => askedAgainAfter?.(state.data?.pages.flatMap((page) => page.items) ?? []) ?? false,
  });
  return {
    items: found.data ?? [],
    isPending: found.isLoading,
    error: found.error,
    hasMore: found.hasNextPage,
    isLoadingMore: found.isFetchingNextPage,
    loadMore: () => {
      if (found.hasNextPage && !found.isFetchingNextPage) void found.fetchNextPage();
    },
    retry: () => void (found.isFetchNextPageError ? found.fetchNextPage() : found.refetch()),
  };
}

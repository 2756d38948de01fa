import { useEffect, useState } from "react";
import { type ItemOf, type PagedPath, type ParamsOf, usePages } from "./client";

/** So many items are read by themselves: a large catalog must not keep the page busy. */
const READ_AT_FIRST = 1000;

export interface Whole<Item> {
  items: Item[];
  /** Nothing of the list is missing in `items`. */
  isWhole: boolean;
  isReading: boolean;
  /** Of the page that could not be read. */
  error: unknown;
  /** Reads as many items again; for a list that is longer than what is read by itself. */
  readOn: () => void;
  retry: () => void;
}

interface WholeOptions<Item> {
  enabled?: boolean;
  /** Whether the rest of the list has nothing that is looked for. */
  isEnough?: (items: readonly Item[]) => boolean;
  /** As for `usePages`. */
  askedAgainAfter?: (items: readonly Item[]) => number;
}

/** A list that is read page after page without being scrolled, to its end or to a bound. For what may say that there
 * is nothing: only `isWhole` allows that. */
export function useWhole<Path extends PagedPath>(
  path: Path,
  params: ParamsOf<Path>,
  { isEnough = () => false, ...options }: WholeOptions<ItemOf<Path>> = {},
): Whole<ItemOf<Path>> {
  const { enabled = true } = options;
  const { items, isPending, error, hasMore, isLoadingMore, loadMore, retry } = usePages(path, params, options);
  const [most, setMost] = useState(READ_AT_FIRST);
  const isDone = !hasMore || isEnough(items);
  const wantsMore = enabled && !isDone && !error && items.length < most;

  useEffect(() => {
    if (wantsMore && !isLoadingMore) loadMore();
  }, [wantsMore, isLoadingMore, loadMore]);

  return {
    items,
    isWhole: enabled && !isPending && !error && isDone,
    isReading: isPending || wantsMore,
    error,
    readOn: () => setMost(items.length + READ_AT_FIRST),
    retry,
  };
}

import {
  type ColumnDef,
  createColumnHelper,
  getCoreRowModel,
  type RowData,
  useReactTable,
} from "@tanstack/react-table";
import { useVirtualizer } from "@tanstack/react-virtual";
import {
  type CSSProperties,
  type KeyboardEvent,
  type ReactNode,
  useEffect,
  useId,
  useMemo,
  useRef,
  useState,
} from "react";
import type { Pages } from "@/api/client";
import styles from "./DataTable.module.css";
import { ErrorState, Loading } from "./states";

declare module "@tanstack/react-table" {
  interface ColumnMeta<TData extends RowData, TValue> {
    /** Numbers stand on the right. */
    align?: "right";
    /** false: left out on a phone. */
    phone?: boolean;
  }
}

export { createColumnHelper };

// biome-ignore lint/suspicious/noExplicitAny: a column's value has any type; TanStack's own signature.
export type Columns<Row> = ColumnDef<Row, any>[];

interface DataTableProps<Row> {
  /** For screen readers: what the rows are. */
  label: string;
  /** Kept between renderings (a constant, or useMemo). `size` is the least width in px, and a column's share. */
  columns: Columns<Row>;
  /** Of `usePages`, or `allRows(rows)` for what has no pages. */
  pages: Pages<Row>;
  rowKey: (row: Row) => string;
  /** What stands in place of no rows: says what to do. */
  empty: ReactNode;
  /** Enter, and a click beside links. */
  onOpen?: (row: Row) => void;
  /** Keys of selected rows. With `onSelect` there is a column of checkboxes, and Space selects. */
  selected?: ReadonlySet<string>;
  onSelect?: (selected: ReadonlySet<string>) => void;
}

const ROW_PX = 38;
/** So near to the end the next page is asked for. */
const LOAD_MORE_BEFORE = 20;
const CHECKBOX_PX = 40;

/** A list that is not paged, as DataTable takes it. */
export function allRows<Row>(rows: readonly Row[]): Pages<Row> {
  const nothing = () => undefined;
  return {
    items: rows as Row[],
    isPending: false,
    error: null,
    hasMore: false,
    isLoadingMore: false,
    loadMore: nothing,
    retry: nothing,
  };
}

/** What stands in a cell. Not by TanStack's flexRender: to React another function is another component, so columns that
 * are made anew with each poll would take the focus out of their cells. A cell's function uses no hooks therefore. */
function shown<Context>(cell: string | ((context: Context) => ReactNode) | undefined, context: Context): ReactNode {
  return typeof cell === "function" ? cell(context) : cell;
}

/** A table of however many rows: only those in sight are in the page, and pages are read as it is scrolled. Arrow keys,
 * Page Up and Down, Home and End move the active row. */
export function DataTable<Row>(props: DataTableProps<Row>) {
  const { label, columns, pages, rowKey, empty, onOpen, selected, onSelect } = props;
  const { items, error, hasMore, loadMore } = pages;
  const scroller = useRef<HTMLDivElement>(null);
  const [chosen, setChosen] = useState<{ key: string; index: number } | null>(null);
  const active = chosen === null ? 0 : placeOf(chosen, items, rowKey);
  const id = useId();

  const virtual = useVirtualizer({
    count: items.length,
    getScrollElement: () => scroller.current,
    estimateSize: () => ROW_PX,
    overscan: 12,
    // The header is sticky above the rows.
    scrollMargin: ROW_PX,
    scrollPaddingStart: ROW_PX,
  });
  const inSight = virtual.getVirtualItems();
  const first = inSight[0]?.index ?? 0;
  const last = inSight.at(-1)?.index ?? -1;
  // TanStack's row model is made anew with each page; of the rows in sight alone that takes no time.
  const data = useMemo(() => items.slice(first, last + 1), [items, first, last]);
  const table = useReactTable({ data, columns, getRowId: rowKey, getCoreRowModel: getCoreRowModel() });
  const { rows } = table.getRowModel();

  useEffect(() => {
    if (hasMore && !error && last >= 0 && last >= items.length - LOAD_MORE_BEFORE) loadMore();
  }, [hasMore, error, last, items.length, loadMore]);

  const shape = useMemo(() => shapeOf(columns, onSelect !== undefined), [columns, onSelect]);

  if (pages.isPending) return <Loading what={label.toLowerCase()} />;
  if (items.length === 0) return error ? <ErrorState error={error} onRetry={pages.retry} /> : empty;

  function toggle(key: string) {
    const next = new Set(selected);
    if (!next.delete(key)) next.add(key);
    onSelect?.(next);
  }

  function choose(index: number) {
    const row = items[index];
    if (row !== undefined) setChosen({ key: rowKey(row), index });
  }

  function move(to: number) {
    const index = Math.max(0, Math.min(items.length - 1, to));
    choose(index);
    virtual.scrollToIndex(index);
  }

  function onKeyDown(event: KeyboardEvent) {
    if (event.target !== event.currentTarget) return; // a link or a checkbox in a row has keys of its own
    const page = Math.max(1, Math.floor((scroller.current?.clientHeight ?? 0) / ROW_PX) - 2);
    const steps: Record<string, number> = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page };
    const row = items[active];
    if (event.key in steps) move(active + (steps[event.key] ?? 0));
    else if (event.key === "Home") move(0);
    else if (event.key === "End") move(items.length - 1);
    else if (event.key === "Enter" && row && onOpen) onOpen(row);
    else if (event.key === " " && row && onSelect) toggle(rowKey(row));
    else return;
    event.preventDefault();
  }

  const all =
    selected !== undefined && selected.size >= items.length && items.every((row) => selected.has(rowKey(row)));
  return (
    <>
      <div
        ref={scroller}
        className={styles.scroller}
        style={shape}
        role="grid"
        tabIndex={0}
        aria-label={label}
        aria-rowcount={hasMore ? -1 : items.length + 1}
        aria-multiselectable={onSelect ? true : undefined}
        aria-activedescendant={inSight.some((each) => each.index === active) ? `${id}-${active}` : undefined}
        onFocus={() => choose(active)}
        onKeyDown={onKeyDown}
      >
        <div role="rowgroup" className={styles.head}>
          {table.getHeaderGroups().map((group) => (
            <div role="row" aria-rowindex={1} className={styles.row} key={group.id}>
              {onSelect && (
                <div role="columnheader" className={styles.cell}>
                  <input
                    type="checkbox"
                    aria-label="Select all that are loaded"
                    checked={all}
                    onChange={() => onSelect(new Set(all ? [] : items.map(rowKey)))}
                  />
                </div>
              )}
              {group.headers.map((header) => (
                <div role="columnheader" className={cellClass(header.column.columnDef.meta)} key={header.id}>
                  {shown(header.column.columnDef.header, header.getContext())}
                </div>
              ))}
            </div>
          ))}
        </div>
        <div role="rowgroup" className={styles.body} style={{ height: virtual.getTotalSize() }}>
          {inSight.map(({ index, start }) => {
            const row = rows[index - first];
            if (row === undefined) return null;
            return (
              // biome-ignore lint/a11y/useKeyWithClickEvents: the grid itself has the keys.
              <div
                role="row"
                id={`${id}-${index}`}
                key={row.id}
                aria-rowindex={index + 2}
                aria-selected={onSelect ? (selected?.has(row.id) ?? false) : undefined}
                className={`${styles.row} ${styles.virtual} ${index === active ? styles.active : ""} ${onOpen ? styles.opens : ""}`}
                style={{ transform: `translateY(${start - ROW_PX}px)` }}
                onClick={(event) => {
                  choose(index);
                  if (onOpen && !(event.target as Element).closest("a, button, input")) onOpen(row.original);
                }}
              >
                {onSelect && (
                  <div role="gridcell" className={styles.cell}>
                    <input
                      type="checkbox"
                      tabIndex={-1}
                      aria-label="Select"
                      checked={selected?.has(row.id) ?? false}
                      onChange={() => toggle(row.id)}
                    />
                  </div>
                )}
                {row.getVisibleCells().map((cell) => (
                  <div role="gridcell" className={cellClass(cell.column.columnDef.meta)} key={cell.id}>
                    {shown(cell.column.columnDef.cell, cell.getContext())}
                  </div>
                ))}
              </div>
            );
          })}
        </div>
      </div>
      {error ? <ErrorState error={error} onRetry={pages.retry} /> : null}
      <p className={`quiet ${styles.count}`} role="status">
        {pages.isLoadingMore
          ? "Loading more…"
          : `${items.length.toLocaleString()} ${hasMore ? "loaded; scroll for more" : "in all"}`}
      </p>
    </>
  );
}

/** Where the active row is by now: other rows come and go. One that has gone leaves its place to the next. */
function placeOf<Row>(
  { key, index }: { key: string; index: number },
  items: readonly Row[],
  rowKey: (row: Row) => string,
): number {
  const there = items[index];
  if (there !== undefined && rowKey(there) === key) return index;
  const found = items.findIndex((row) => rowKey(row) === key);
  return found < 0 ? Math.min(index, items.length - 1) : found;
}

function cellClass(meta: { align?: "right"; phone?: boolean } | undefined): string {
  return [styles.cell, meta?.align === "right" && styles.right, meta?.phone === false && styles.wideOnly]
    .filter(Boolean)
    .join(" ");
}

/** The widths of the columns, on a wide screen and on a phone: DataTable.module.css chooses. */
function shapeOf<Row>(columns: Columns<Row>, checkboxes: boolean): CSSProperties {
  const track = (column: Columns<Row>[number]) => `minmax(${column.size ?? 120}px, ${column.size ?? 120}fr)`;
  const first = checkboxes ? [`${CHECKBOX_PX}px`] : [];
  const narrow = columns.filter((column) => column.meta?.phone !== false);
  return {
    "--wide": [...first, ...columns.map(track)].join(" "),
    "--narrow": [...first, ...narrow.map(track)].join(" "),
  } as CSSProperties;
}

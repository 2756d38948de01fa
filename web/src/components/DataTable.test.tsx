import { act, fireEvent, render, screen, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import type { Pages } from "@/api/client";
import { allRows, type Columns, createColumnHelper, DataTable } from "./DataTable";

interface Row {
  id: string;
  step: number;
}

const column = createColumnHelper<Row>();
const COLUMNS: Columns<Row> = [column.accessor("step", { header: "Step" })];
const rows = (count: number): Row[] => Array.from({ length: count }, (_, step) => ({ id: `row-${step}`, step }));

function show(pages: Pages<Row>, more: Partial<Parameters<typeof DataTable<Row>>[0]> = {}) {
  return render(
    <DataTable label="Steps" columns={COLUMNS} pages={pages} rowKey={(row) => row.id} empty={<p>None</p>} {...more} />,
  );
}

it("has only the rows in sight in the page, however many there are", () => {
  show(allRows(rows(100_000)));
  const grid = screen.getByRole("grid", { name: "Steps" });
  expect(grid).toHaveAttribute("aria-rowcount", "100001");
  expect(within(grid).getAllByRole("row").length).toBeLessThan(60);
  expect(screen.getByText(/100,000 in all/)).toBeVisible();
});

it("asks for the next page near the end of what is loaded, and not before", () => {
  const loadMore = vi.fn();
  const { unmount } = show({ ...allRows(rows(500)), hasMore: true, loadMore });
  expect(loadMore).not.toHaveBeenCalled();
  unmount();
  show({ ...allRows(rows(30)), hasMore: true, loadMore });
  expect(loadMore).toHaveBeenCalled();
});

it("asks for no further page by itself once one has failed, and offers to retry", async () => {
  const [loadMore, retry] = [vi.fn(), vi.fn()];
  show({ ...allRows(rows(30)), hasMore: true, error: new Error("out of memory"), loadMore, retry });
  expect(loadMore).not.toHaveBeenCalled();
  await userEvent.click(screen.getByRole("button", { name: "Retry" }));
  expect(retry).toHaveBeenCalledOnce();
});

it("moves the active row by the keyboard and opens it", async () => {
  const onOpen = vi.fn();
  show(allRows(rows(1000)), { onOpen });
  const grid = screen.getByRole("grid");
  grid.focus();
  await userEvent.keyboard("{ArrowDown}{ArrowDown}{ArrowUp}{Enter}");
  expect(onOpen).toHaveBeenLastCalledWith({ id: "row-1", step: 1 });
  fireEvent.keyDown(grid, { key: "End" });
  fireEvent.keyDown(grid, { key: "Enter" });
  expect(onOpen).toHaveBeenLastCalledWith({ id: "row-999", step: 999 });
});

it("keeps the active row when other rows come before it or go", async () => {
  const onOpen = vi.fn();
  const table = (first: number, last: number) => (
    <DataTable
      label="Steps"
      columns={COLUMNS}
      pages={allRows(rows(last).slice(first))}
      rowKey={(row) => row.id}
      empty={<p>None</p>}
      onOpen={onOpen}
    />
  );
  const { rerender } = render(table(3, 10));
  act(() => screen.getByRole("grid").focus());
  rerender(table(2, 10));
  await userEvent.keyboard("{Enter}");
  expect(onOpen).toHaveBeenLastCalledWith({ id: "row-3", step: 3 });
  await userEvent.keyboard("{ArrowDown}");
  rerender(table(0, 10));
  await userEvent.keyboard("{Enter}");
  expect(onOpen).toHaveBeenLastCalledWith({ id: "row-4", step: 4 });
  rerender(table(0, 3));
  await userEvent.keyboard("{Enter}");
  expect(onOpen).toHaveBeenLastCalledWith({ id: "row-2", step: 2 });
});

it("selects rows by Space and by their checkboxes", async () => {
  const onSelect = vi.fn();
  show(allRows(rows(3)), { selected: new Set(["row-2"]), onSelect });
  screen.getByRole("grid").focus();
  await userEvent.keyboard(" ");
  expect(onSelect).toHaveBeenLastCalledWith(new Set(["row-2", "row-0"]));
  await userEvent.click(screen.getAllByRole("checkbox", { name: "Select" })[2] as HTMLElement);
  expect(onSelect).toHaveBeenLastCalledWith(new Set());
  await userEvent.click(screen.getByRole("checkbox", { name: "Select all that are loaded" }));
  expect(onSelect).toHaveBeenLastCalledWith(new Set(["row-0", "row-1", "row-2"]));
});

it("says what to do where there are no rows, and why where they could not be read", () => {
  const { unmount } = show(allRows([]));
  expect(screen.getByText("None")).toBeVisible();
  unmount();
  show({ ...allRows<Row>([]), error: new TypeError("Failed to fetch") });
  expect(screen.getByRole("alert")).toHaveTextContent("The service gave no answer");
});

it("leaves the focus in a cell when its columns are made anew", () => {
  const columns = (): Columns<Row> => [
    column.display({
      id: "do",
      header: "",
      cell: ({ row }) => <button type="button">Undo {row.original.step}</button>,
    }),
  ];
  const table = () => (
    <DataTable label="Steps" columns={columns()} pages={allRows(rows(3))} rowKey={({ id }) => id} empty={null} />
  );
  const { rerender } = render(table());
  const button = screen.getByRole("button", { name: "Undo 1" });
  button.focus();
  rerender(table());
  expect(button).toHaveFocus();
});

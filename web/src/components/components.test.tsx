import { fireEvent, render, screen, waitFor } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { ProblemError } from "@/api/problem";
import { renderSignedIn, signedIn } from "@/testing/page";
import { Can } from "./Can";
import { ConfirmDialog } from "./ConfirmDialog";
import { CopyCommand } from "./CopyCommand";
import { StateBadge } from "./StateBadge";
import { ErrorState } from "./states";
import { Age, Bytes, Money, Time } from "./values";

const PROBLEM = {
  type: "about:blank",
  title: "Held",
  status: 409,
  code: "checkpoint_held",
  detail: "Step 4 is held by legal. Release the hold first.",
  retryable: false,
  request_id: "req-7",
};

it("shows a time with UTC as its description on focus", async () => {
  renderSignedIn(<Time at="2026-01-02T03:04:05Z" />);
  await userEvent.tab();
  expect(await screen.findByRole("tooltip")).toHaveTextContent("2026-01-02 03:04:05 UTC");
});

it("shows an age by its two largest parts", () => {
  renderSignedIn(<Age since={new Date(Date.now() - 3_725_000).toISOString()} />);
  expect(screen.getByText("1 h 2 min")).toBeVisible();
});

it("says bytes and money, and that there is no value", () => {
  render(
    <>
      <Bytes count={1536} />
      <Money amount={1234.5} currency="USD" />
      <Bytes count={null} />
    </>,
  );
  expect(screen.getByText("1.5 KiB")).toBeVisible();
  expect(screen.getByText(/1,23[45] USD/)).toBeVisible();
  expect(screen.getByText("none")).toBeInTheDocument();
});

it("says a state by its word", () => {
  render(<StateBadge state="pending_collection" />);
  expect(screen.getByText("pending collection")).toBeVisible();
});

it("shows the service's own sentence, its code and the request of a failure", () => {
  render(<ErrorState error={new ProblemError(PROBLEM)} />);
  const alert = screen.getByRole("alert");
  expect(alert).toHaveTextContent("Release the hold first.");
  expect(alert).toHaveTextContent("checkpoint_held, request req-7");
});

describe("Can", () => {
  const clicked = vi.fn();
  const button = (
    <button type="button" onClick={clicked}>
      Pin
    </button>
  );
  beforeEach(() => clicked.mockReset());

  it("leaves a control alone that the token may use", async () => {
    renderSignedIn(<Can scope="operate">{button}</Can>);
    await userEvent.click(screen.getByRole("button"));
    expect(clicked).toHaveBeenCalledOnce();
  });

  it("disables one that it may not use, keeps it in reach of the keyboard, and says why", async () => {
    renderSignedIn(<Can scope="admin">{button}</Can>);
    await userEvent.tab();
    expect(screen.getByRole("button")).toHaveFocus();
    expect(screen.getByRole("button")).toHaveAttribute("aria-disabled", "true");
    expect(await screen.findByRole("tooltip")).toHaveTextContent("has not the scope “admin”");
    await userEvent.keyboard("{Enter}");
    await userEvent.click(screen.getByRole("button"));
    expect(clicked).not.toHaveBeenCalled();
  });
});

describe("Hint", () => {
  it("stays while its control has the keyboard’s focus, though the page scrolls, until Escape", async () => {
    renderSignedIn(
      <Can scope="admin">
        <button type="button">Pin</button>
      </Can>,
    );
    await userEvent.tab();
    expect(await screen.findByRole("tooltip")).toBeInTheDocument();
    fireEvent.scroll(document);
    expect(screen.getByRole("tooltip")).toBeInTheDocument();
    await userEvent.keyboard("{Escape}");
    await waitFor(() => expect(screen.queryByRole("tooltip")).toBeNull());
  });

  it("goes when the focus goes", async () => {
    renderSignedIn(
      <Can scope="admin">
        <button type="button">Pin</button>
      </Can>,
    );
    await userEvent.tab();
    expect(await screen.findByRole("tooltip")).toBeInTheDocument();
    await userEvent.tab();
    await waitFor(() => expect(screen.queryByRole("tooltip")).toBeNull());
  });

  it("leaves its control the focus when the reason comes and goes", async () => {
    const control = (reason?: string) => (
      <Can scope="operate" reason={reason}>
        <button type="button">Undo</button>
      </Can>
    );
    const { rerender } = renderSignedIn(control());
    await userEvent.tab();
    rerender(signedIn(control("It is being taken back.")));
    expect(screen.getByRole("button")).toHaveFocus();
    rerender(signedIn(control()));
    expect(screen.getByRole("button")).toHaveFocus();
  });
});

describe("ConfirmDialog", () => {
  it("acts only when the count is typed, then closes", async () => {
    const [onConfirm, onClose] = [vi.fn(async () => undefined), vi.fn()];
    render(
      <ConfirmDialog title="Expire" action="Expire 12" typed="12" onConfirm={onConfirm} onClose={onClose}>
        <p>12 checkpoints go to the trash.</p>
      </ConfirmDialog>,
    );
    expect(screen.getByRole("button", { name: "Expire 12" })).toBeDisabled();
    await userEvent.type(screen.getByLabelText("Type 12 to go on"), "12");
    await userEvent.click(screen.getByRole("button", { name: "Expire 12" }));
    expect(onConfirm).toHaveBeenCalledOnce();
    expect(onClose).toHaveBeenCalledOnce();
  });

  it("closes on Escape, and on none while it acts", async () => {
    const onClose = vi.fn();
    render(
      <ConfirmDialog title="Delete" action="Delete" onConfirm={() => new Promise(() => undefined)} onClose={onClose}>
        <p>It goes to the trash.</p>
      </ConfirmDialog>,
    );
    expect(fireEvent.keyDown(document.body, { key: "Escape" })).toBe(false);
    expect(onClose).toHaveBeenCalledOnce();
    await userEvent.click(screen.getByRole("button", { name: "Delete" }));
    // A browser asks `cancel` for the first one alone: what is told of no key closes the dialog.
    for (const _ of [1, 2]) expect(fireEvent.keyDown(document.body, { key: "Escape" })).toBe(false);
    expect(onClose).toHaveBeenCalledOnce();
  });

  it("leaves a key to the dialog above it", () => {
    const [onClose, onCloseAbove] = [vi.fn(), vi.fn()];
    render(
      <>
        <ConfirmDialog title="Below" action="Go" onConfirm={async () => undefined} onClose={onClose}>
          <p>It is under another one.</p>
        </ConfirmDialog>
        <ConfirmDialog title="Above" action="Go" onConfirm={async () => undefined} onClose={onCloseAbove}>
          <p>It was opened last.</p>
        </ConfirmDialog>
      </>,
    );
    fireEvent.keyDown(document.body, { key: "Escape" });
    expect(onCloseAbove).toHaveBeenCalledOnce();
    expect(onClose).not.toHaveBeenCalled();
  });

  it("stays open with the reason if the service refuses", async () => {
    const onClose = vi.fn();
    const refused = () => Promise.reject(new ProblemError(PROBLEM));
    render(
      <ConfirmDialog title="Delete" action="Delete" onConfirm={refused} onClose={onClose}>
        <p>It goes to the trash.</p>
      </ConfirmDialog>,
    );
    await userEvent.click(screen.getByRole("button", { name: "Delete" }));
    expect(await screen.findByRole("alert")).toHaveTextContent("Step 4 is held by legal.");
    expect(onClose).not.toHaveBeenCalled();
    await userEvent.click(screen.getByRole("button", { name: "Cancel" }));
    expect(onClose).toHaveBeenCalledOnce();
  });
});

it("copies a command", async () => {
  const user = userEvent.setup();
  render(<CopyCommand command="holdfast pull demo/run" label="pull" />);
  await user.click(screen.getByRole("button", { name: "Copy: pull" }));
  expect(await navigator.clipboard.readText()).toBe("holdfast pull demo/run");
  expect(screen.getByRole("status")).toHaveTextContent("Copied");
});

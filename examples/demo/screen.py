"""What a person sees: one progress bar over the whole demo, a line for each thing that happened, a short table."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


class Screen:
    """`total` counts training steps. Without a terminal only the lines are printed."""

    def __init__(self, total: int) -> None:
        self.console = Console(highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total)
        self._done = 0

    def phase(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def trained(self, steps: int) -> None:
        """Steps of the phase that runs, so far."""
        self._progress.update(self._task, completed=self._done + steps)

    def happened(self, text: str, *, steps: int = 0) -> None:
        """The phase is over: it trained `steps`."""
        self._done += steps
        self._progress.update(self._task, completed=self._done)
        self.console.print(f"  [green]✓[/green] {text}", soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for column in columns:
            table.add_column(column)
        for row in rows:
            table.add_row(*row)
        self.console.print()
        self.console.print(table)
        self.console.print()

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

"""A progress bar over a run's output tokens, on terminals. Entry point: `Bar`."""

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.cli.bench_cases import Case


class Bar:
    """Entered, gives what is to be told of each new token; gone when left."""

    def __init__(self, case: Case, number: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeElapsedColumn(),
        )
        console = Console(stderr=True)
        # Stopped, it would print an empty line where it isn't shown.
        self._is_shown = console.is_terminal
        self._progress = Progress(*columns, console=console, transient=True)
        self._total = sum(request.num_output_tokens for request in case.requests)
        self._label = f"{case.name}, run {number + 1}"

    def __enter__(self) -> Callable[[int], None]:
        if not self._is_shown:
            return ignore
        self._progress.start()
        task = self._progress.add_task(self._label, total=self._total)
        return lambda count: self._progress.advance(task, count)

    def __exit__(self, *exc_info: object) -> None:
        if self._is_shown:
            self._progress.stop()


def ignore(count: int) -> None:
    """Tell nobody."""
    del count

"""What `octavo top` shows of a board, as wide as the terminal, from 80 columns on.

Pictures are opaque to everybody but live views, and older schedulers say less: a number that is
missing shows as 0. Must not know: how pictures come. Entry point: `screen_of`.
"""

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from octavo.cli.chat_markdown import printable
from octavo.cli.top_board import Board, Picture, Sight

# State of blocks: how a bar shows it, with colours and without.
_BLOCKS = (("used", "█", "blue"), ("shared", "▓", "yellow"), ("cached", "▒", "cyan"))
_FREE = ("░", "bright_black")
_PHASE_STYLES = {
    "running": "green",
    "leaving": "yellow",
    "awaited": "yellow",
    "gone": "red",
    "taken": "yellow",
}
_OUTCOME_STYLES = {"stop": "green", "length": "green", "error": "red", "deadline": "red"}
_NARROW, _WIDE_BAR, _NARROW_BAR = 100, 32, 12


def screen_of(board: Board, width: int, height: int | None = None) -> RenderableType:
    """Everything, the last requests as far as `height` lines allow (None: all of them)."""
    parts: list[RenderableType] = [_summary(board)]
    num_lines = 2
    for sight in board.sights.values():
        workers = [] if sight.picture is None else list(sight.picture.get("workers", ()))
        parts += ["", _cell_line(sight)]
        num_lines += 2
        if workers and not sight.problem:
            parts.append(_workers_table(workers, width))
            num_lines += 1 + len(workers)
    room = None if height is None else height - num_lines - 3
    requests = _requests(board.pictures)
    if requests and (room is None or room > 0):
        parts += ["", _requests_table(requests[:room], width)]
    return Group(*parts)


def _summary(board: Board) -> Text:
    pictures = board.pictures
    workers = [worker for picture in pictures for worker in picture.get("workers", ())]
    num_blocks = _sum(workers, "num_blocks")
    queries = _sum(pictures, "prefix_queries")
    used = _sum(workers, "num_used_blocks") / num_blocks if num_blocks else None
    hits = _sum(pictures, "prefix_hits") / queries if queries else None
    numbers = (
        (_count(_sum(workers, "decode_tokens_per_s")), "tok/s"),
        (_count(_sum(workers, "prefill_tokens_per_s")), "prompt/s"),
        (_count(_sum(pictures, "num_running")), "running"),
        (_count(_sum(pictures, "num_waiting")), "waiting"),
        (_percent(used), "KV"),
        (_percent(hits), "hits"),
    )
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append("octavo", "bold")
    for value, name in numbers:
        line.append("  ").append(value, "bold").append(f" {name}")
    if not board.sights or board.problem:
        line.append(f"\n{printable(board.problem) or 'no cell yet'}", "red")
    return line


def _cell_line(sight: Sight) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(printable(sight.scheduler_id) or "scheduler", "bold")
    if sight.problem:
        return line.append(f"  {sight.address}  ", "dim").append(printable(sight.problem), "red")
    if sight.picture is None:
        return line.append(f"  {sight.address}  ", "dim").append("no picture yet", "yellow")
    picture = sight.picture
    is_draining = bool(picture.get("draining"))
    line.append("  draining" if is_draining else "  serving", "yellow" if is_draining else "green")
    num_waiting = _number(picture, "num_waiting")
    line.append(f"  {_count(_number(picture, 'queue_tokens'))} tokens queued")
    if num_waiting:
        line.append(f", oldest {_seconds(_number(picture, 'oldest_wait_s'))}")
    for name, word in (("num_preemptions", "preempted"), ("num_moves", "moved")):
        if number := _number(picture, name):
            line.append(f"  {_count(number)} {word}")
    return line.append(f"  {sight.address}", "dim")


def _workers_table(workers: list[dict[str, Any]], width: int) -> Table:
    table = _table()
    table.add_column("WORKER", no_wrap=True, min_width=8, max_width=20, overflow="ellipsis")
    table.add_column("STATE")
    table.add_column("EPOCH", justify="right")
    table.add_column("ROWS", justify="right")
    table.add_column("KV BLOCKS")
    for name in ("USED", "TOK/S", "PROMPT/S", "STEP"):
        table.add_column(name, justify="right")
    bar_width = _NARROW_BAR if width < _NARROW else _WIDE_BAR
    for worker in sorted(workers, key=lambda worker: str(worker.get("worker_id"))):
        phase = str(worker.get("phase", ""))
        state = Text(printable(phase), _PHASE_STYLES.get(phase, ""))
        name = printable(str(worker.get("worker_id") or worker.get("address", "")))
        if phase not in ("running", "leaving"):
            table.add_row(Text(name, "dim"), state, "", "", Text(_loss_of(worker), "dim"))
            continue
        num_blocks = _number(worker, "num_blocks")
        table.add_row(
            Text(name),
            state,
            _count(_number(worker, "epoch")),
            f"{_number(worker, 'num_rows'):.0f}/{_number(worker, 'max_num_seqs'):.0f}",
            _bar(worker, bar_width),
            _percent(_number(worker, "num_used_blocks") / num_blocks if num_blocks else None),
            _count(_number(worker, "decode_tokens_per_s")),
            _count(_number(worker, "prefill_tokens_per_s")),
            _milliseconds(_number(worker, "decode_step_ms") or None),
        )
    return table


def _bar(worker: dict[str, Any], width: int) -> Text:
    """The pool's blocks by state; a state that is there has a mark at least."""
    num_blocks = max(_number(worker, "num_blocks"), 1)
    shared = _number(worker, "num_shared_blocks")
    counts = {
        "used": _number(worker, "num_used_blocks") - shared,
        "shared": shared,
        "cached": _number(worker, "num_cached_blocks"),
    }
    bar = Text()
    for state, mark, style in _BLOCKS:
        cells = round(width * counts[state] / num_blocks) or int(counts[state] > 0)
        bar.append(mark * min(cells, width - len(bar)), style)
    return bar.append(_FREE[0] * (width - len(bar)), _FREE[1])


def _loss_of(worker: dict[str, Any]) -> str:
    gone_s = worker.get("gone_s")
    return "" if gone_s is None else f"{worker.get('loss')}, {_seconds(gone_s)} ago"


def _requests_table(requests: list[dict[str, Any]], width: int) -> Table:
    is_narrow = width < _NARROW
    table = _table()
    table.add_column(
        "REQUEST", no_wrap=True, max_width=12 if is_narrow else 36, overflow="ellipsis"
    )
    table.add_column("STATE")
    table.add_column("WORKER", no_wrap=True, max_width=10 if is_narrow else 20, overflow="ellipsis")
    table.add_column("WHY")
    for name in ("PROMPT", "CACHED", "OUT", "FIRST"):
        table.add_column(name, justify="right")
    if not is_narrow:
        table.add_column("QUEUED", justify="right")
    for request in requests:
        state = str(request.get("outcome") or request.get("phase", ""))
        row = [
            Text(printable(str(request.get("request_id", "")))),
            Text(printable(state), _OUTCOME_STYLES.get(state, "")),
            Text(printable(str(request.get("worker_id", "")))),
            Text(printable(str(request.get("why") or "–"))),
            _count(_number(request, "num_prompt_tokens")),
            _count(_number(request, "num_cached_tokens")),
            _count(_number(request, "num_generated_tokens")),
            _milliseconds(request.get("ttft_ms")),
        ]
        table.add_row(*row, *([] if is_narrow else [_milliseconds(request.get("queue_ms"))]))
    return table


def _requests(pictures: Iterable[Picture]) -> list[dict[str, Any]]:
    """Of all cells, the newest first."""
    requests = [request for picture in pictures for request in picture.get("requests", ())]
    return sorted(requests, key=lambda request: _number(request, "age_s"))


def _table() -> Table:
    return Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")


def _number(values: Picture, name: str) -> float:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _sum(items: Iterable[Picture], name: str) -> float:
    return sum(_number(item, name) for item in items)


def _count(value: float) -> str:
    return f"{value:.1f}" if 0 < value < 10 and value % 1 else f"{value:,.0f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _milliseconds(ms: float | None) -> str:
    if ms is None:
        return "–"
    if ms >= 1000:
        return _seconds(ms / 1000)
    return f"{ms:.1f} ms" if 0 < ms < 10 else f"{ms:.0f} ms"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"

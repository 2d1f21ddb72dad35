"""`octavo bench serve`: measure any OpenAI-compatible server, or compare several.

Read first: `_Bench`. The same requests at the same times go to each server, one server after
the other. In an open loop arrivals never wait for answers, and latencies count from the moment
at which a request was due, so that a server that falls behind can't hide it. Entry point: `main`.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from octavo.cli.chat_client import ChatClient
from octavo.cli.event_loop import loop_factory
from octavo.cli.measurement import append_record
from octavo.cli.openai_url import api_base, api_key
from octavo.cli.serve_charts import histogram
from octavo.cli.serve_client import Outcome, Server, send
from octavo.cli.serve_load import Arrival, PromptMaker
from octavo.cli.serve_options import ServeOptions, parse_serve_options
from octavo.cli.serve_plots import check_matplotlib, write_plots
from octavo.cli.serve_report import comparison, make_serve_record, warnings
from octavo.cli.serve_run import LoadResult, Prepared, Progress, allow_many_connections, run_load
from octavo.errors import OctavoError

_PROBE_WORDS = (20, 220)


def main(argv: list[str] | None = None) -> int:
    """Measure; the table goes to stderr, a JSON line per server to stdout (in a pipe). Status 1
    if a request failed."""
    options = parse_serve_options(argv)
    if options.plot is not None:
        check_matplotlib()
    allow_many_connections()
    bench = _Bench(options, [_server(options, label, url) for label, url in options.servers])
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(bench.run())


def _server(options: ServeOptions, label: str, url: str) -> Server:
    """Raises OctavoError if there is none, or it serves nothing."""
    base, key, model = api_base(url), api_key(options.api_key), options.model
    if model is None:
        with ChatClient(base, key) as client:
            models = client.models()
        if not models:
            raise OctavoError(f"{base} serves no model")
        model = models[0]
    named = (label, base, model, options.is_chat, key, options.timeout_s)
    return Server(*named, options=options.request_fields)


class _Bench:
    """All servers of a comparison, one after the other."""

    def __init__(self, options: ServeOptions, servers: Sequence[Server]) -> None:
        self._options = options
        self._servers = servers
        self._out = Console(stderr=True)

    async def run(self) -> int:
        options = self._options
        # Before the first is measured: what the last refuses must not cost an hour.
        makers = [await self._prompt_maker(server) for server in self._servers]
        results: dict[str, LoadResult] = {}
        records: list[dict[str, Any]] = []
        for server, maker in zip(self._servers, makers, strict=True):
            result = await self._measure(server, maker)
            results[server.label] = result
            record = make_serve_record(result, self._facts(server, maker), options.slo)
            records.append(record)
            # On a terminal the table says it all.
            if not sys.stdout.isatty():
                print(json.dumps(record), flush=True)
            append_record(options.record, json.dumps(record))
        self._show(records, results)
        return int(any(record["errors"] for record in records))

    async def _prompt_maker(self, server: Server) -> PromptMaker:
        """Learn what prompts the server takes and how it counts them; warms it up as well."""
        options = self._options
        maker = PromptMaker(options.seed, options.is_chat, options.vocab_size)
        if not maker.is_words:
            probe = await self._probe(server, maker, 32)
            if probe.error is None:
                return maker
            if probe.error != "http 400":
                raise OctavoError(f"{server.label}: {probe.error}: {probe.detail}")
            maker = replace(maker, is_words=True)
            reason = probe.detail[:200]
            self._out.print(f"{server.label} takes no ids, so it gets words ({reason})")
        # Two points tell the tokens of a word from those of the chat template.
        few, many = [await self._probe(server, maker, count) for count in _PROBE_WORDS]
        for probe in (few, many):
            if probe.error is not None:
                raise OctavoError(f"{server.label}: {probe.error}: {probe.detail}")
        low, high = few.timing.num_prompt_tokens, many.timing.num_prompt_tokens
        per_word = max(0.1, (high - low) / (_PROBE_WORDS[1] - _PROBE_WORDS[0]))
        return replace(
            maker, tokens_per_word=per_word, extra_tokens=low - _PROBE_WORDS[0] * per_word
        )

    async def _probe(self, server: Server, maker: PromptMaker, num_items: int) -> Outcome:
        # Apart from the requests that are measured: an index that none of them has.
        arrival = Arrival(-num_items, None, num_items, 2)
        return await send(server, server.body(maker.prompt(arrival), 2, None), num_items, None)

    async def _measure(self, server: Server, maker: PromptMaker) -> LoadResult:
        options = self._options

        async def sender(request: Prepared, due_s: float | None) -> Outcome:
            return await send(server, request.body, request.arrival.num_prompt_tokens, due_s)

        def prepared() -> Iterable[Prepared]:
            for arrival in options.load():
                seed = options.seed + arrival.index if options.is_sampled else None
                prompt = maker.prompt(arrival)
                yield Prepared(arrival, server.body(prompt, arrival.num_output_tokens, seed))

        with _Watch(self._out, server.label, options.num_requests) as told:
            return await run_load(
                prepared(),
                sender,
                concurrency=options.concurrency,
                duration_s=options.duration_s,
                progress=Progress(told),
            )

    def _facts(self, server: Server, maker: PromptMaker) -> dict[str, Any]:
        options = self._options
        return {
            "label": server.label,
            "url": server.base,
            "model": server.model,
            "api": "chat" if server.is_chat else "completions",
            "prompts": "words" if maker.is_words else "ids",
            "arrivals": options.arrivals,
            "prompt_tokens": options.prompt_text,
            "output_tokens": options.output_text,
            "sampled": options.is_sampled,
            "ignore_eos": options.ignores_eos,
            "seed": options.seed,
        }

    def _show(self, records: list[dict[str, Any]], results: dict[str, LoadResult]) -> None:
        options = self._options
        self._out.print(comparison(f"{options.arrivals} · {records[0]['model']}", records))
        for record, (label, result) in zip(records, results.items(), strict=True):
            for text in warnings(record, result):
                self._out.print(f"[yellow]{label}:[/] {text}", highlight=False)
            if options.shows_histogram:
                whole = [item for item in result.outcomes if item.error is None]
                ttft_ms = [1e3 * item.ttft_s for item in whole]
                itl_ms = [1e3 * gap for item in whole for gap in item.timing.gaps_s]
                for title, values in (("first token", ttft_ms), ("between frames", itl_ms)):
                    self._out.print(f"\n{histogram(f'{label}: {title}', values)}", highlight=False)
        if options.plot is not None:
            for path in write_plots(options.plot, results, options.slo):
                self._out.print(f"wrote {path}", highlight=False)


class _Watch:
    """A line that shows how far a run is (terminals only)."""

    def __init__(self, out: Console, label: str, total: int | None) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bar = Bar(*columns, console=out, transient=True)
        self._label = label
        self._total = "" if total is None else f" of {total:,}"

    def __enter__(self) -> Callable[[Progress], None]:
        self._bar.start()
        task = self._bar.add_task(self._label)

        def told(progress: Progress) -> None:
            failed = f", {progress.num_failed:,} failed" if progress.num_failed else ""
            in_flight = progress.num_sent - progress.num_ended
            self._bar.update(
                task,
                description=f"{self._label}: {progress.num_ended:,}{self._total} ended, "
                f"{in_flight:,} in flight{failed}",
            )

        return told

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

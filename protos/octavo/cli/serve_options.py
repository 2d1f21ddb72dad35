"""The flags of `octavo bench serve`, checked. Entry point: `parse_serve_options`."""

import argparse
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.cli.openai_url import DEFAULT_URL, Labelled, api_base, split_label
from octavo.cli.serve_load import Arrival, Lengths, make_load, parse_lengths, trace_load
from octavo.cli.serve_report import Slo
from octavo.cli.serve_trace import TraceEntry, load_trace
from octavo.errors import ConfigurationError

_DEFAULT_NUM_REQUESTS = 100
_DEFAULT_CONCURRENCY = 8
_SAMPLED = {"temperature": 1.0, "top_p": 0.95}


@dataclass(frozen=True)
class ServeOptions:
    """What to measure, and how. Exactly one of `rate`, `concurrency` and `trace` is set."""

    servers: tuple[Labelled, ...]
    model: str | None
    api_key: str | None
    is_chat: bool
    rate: float | None
    concurrency: int | None
    trace: tuple[TraceEntry, ...]
    trace_name: str
    # None: as many as the duration has room for.
    num_requests: int | None
    duration_s: float | None
    prompt: Lengths
    output: Lengths
    prompt_text: str
    output_text: str
    ignores_eos: bool
    is_sampled: bool
    extra_body: dict[str, Any]
    vocab_size: int
    seed: int
    timeout_s: float
    slo: Slo
    record: Path | None
    plot: Path | None
    shows_histogram: bool

    @property
    def arrivals(self) -> str:
        """In words, for titles and records."""
        if self.trace:
            return f"trace {self.trace_name}"
        if self.concurrency is not None:
            return f"{self.concurrency} clients"
        return "all at once" if self.rate == float("inf") else f"poisson {self.rate:g}/s"

    @property
    def request_fields(self) -> dict[str, Any]:
        """What every request says besides its prompt."""
        sampling = _SAMPLED if self.is_sampled else {"temperature": 0.0}
        ignore = {"ignore_eos": True} if self.ignores_eos else {}
        return {**sampling, **ignore, **self.extra_body}

    def load(self) -> Iterable[Arrival]:
        """The requests to send: the same at every call."""
        if self.trace:
            return itertools.islice(trace_load(self.trace), self.num_requests)
        return make_load(self.num_requests, self.prompt, self.output, self.rate, self.seed)


def parse_serve_options(argv: Sequence[str] | None) -> ServeOptions:
    """Flags to options. Raises ConfigurationError naming what is wrong."""
    given = _parser().parse_args(argv)
    for flag, value in (
        *(("--rate", given.rate), ("--concurrency", given.concurrency)),
        *(("--num-requests", given.num_requests), ("--duration", given.duration)),
        *(("--timeout", given.timeout), ("--slo-ttft-ms", given.slo_ttft_ms)),
        *(("--slo-tpot-ms", given.slo_tpot_ms), ("--slo-e2e-ms", given.slo_e2e_ms)),
    ):
        if value is not None and not value > 0:
            raise ConfigurationError(f"{flag} {value}: must be above 0")
    if given.vocab_size < 100:
        raise ConfigurationError(f"--vocab-size {given.vocab_size}: must be at least 100")
    trace = load_trace(given.trace, speed=given.trace_speed) if given.trace else []
    num_requests = given.num_requests
    if num_requests is None and given.duration is None and not trace:
        num_requests = _DEFAULT_NUM_REQUESTS
    if num_requests is None and given.rate == float("inf"):
        raise ConfigurationError("--rate inf sends all at once: say with --num-requests how many")
    concurrency = given.concurrency
    if given.rate is None and not trace:
        concurrency = concurrency or _DEFAULT_CONCURRENCY
    return ServeOptions(
        servers=_servers(given.url or [DEFAULT_URL]),
        model=given.model,
        api_key=given.api_key,
        is_chat=given.api == "chat",
        rate=given.rate,
        concurrency=concurrency,
        trace=tuple(trace),
        trace_name=given.trace.name if given.trace else "",
        num_requests=num_requests,
        duration_s=given.duration,
        prompt=parse_lengths("--prompt-tokens", given.prompt_tokens),
        output=parse_lengths("--output-tokens", given.output_tokens),
        prompt_text="trace" if trace else given.prompt_tokens,
        output_text="trace" if trace else given.output_tokens,
        ignores_eos=given.ignore_eos,
        is_sampled=given.sampled,
        extra_body=_object("--extra-body", given.extra_body),
        vocab_size=given.vocab_size,
        seed=given.seed,
        timeout_s=given.timeout,
        slo=Slo(given.slo_ttft_ms, given.slo_tpot_ms, given.slo_e2e_ms),
        record=given.record,
        plot=given.plot,
        shows_histogram=given.histogram,
    )


def _servers(urls: Sequence[str]) -> tuple[Labelled, ...]:
    servers = tuple(map(split_label, urls))
    for label, url in servers:
        api_base(url)
        if sum(label == other for other, _ in servers) > 1:
            raise ConfigurationError(f"--url {label} twice: name them, --url a=... --url b=...")
    return servers


def _object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{flag} {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{flag} {text!r}: must be a JSON object")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo bench serve",
        description="Measure any OpenAI-compatible server, or compare several.",
        epilog="Lengths: N, LOW:HIGH (uniform) or MEAN~STDDEV (normal). Latencies of arrivals at "
        "times (--rate, --trace) count from when a request was due, connecting included.",
    )
    add = parser.add_argument
    add("--url", action="append", metavar="[NAME=]URL", help=f"again to compare [{DEFAULT_URL}]")
    add("--model", help="the model's name [the first that each server lists]")
    add("--api-key", help="[$OCTAVO_API_KEY or $OPENAI_API_KEY]")
    add("--api", choices=("completions", "chat"), default="completions", help="[completions]")
    arrivals = parser.add_mutually_exclusive_group()
    arrivals.add_argument(
        "--rate", type=float, help="Poisson arrivals per second; inf = all at once"
    )
    arrivals.add_argument(
        "--concurrency",
        type=int,
        help=f"clients that wait for an answer before they ask again [{_DEFAULT_CONCURRENCY}]",
    )
    arrivals.add_argument(
        "--trace", type=Path, metavar="FILE", help="arrivals of a Mooncake JSONL or Azure CSV file"
    )
    add("--trace-speed", type=float, default=1.0, help="times as fast as the trace [1]")
    add("--num-requests", type=int, help=f"[{_DEFAULT_NUM_REQUESTS}, or a trace's]")
    add("--duration", type=float, metavar="S", help="send nothing new after S seconds")
    add("--prompt-tokens", default="512", metavar="LENGTHS", help="[512]")
    add("--output-tokens", default="128", metavar="LENGTHS", help="at most; see --ignore-eos [128]")
    add("--ignore-eos", action="store_true", help="answers of just that length, where it is known")
    add("--sampled", action="store_true", help="temperature 1, top_p 0.95, a seed per request")
    add("--extra-body", default="{}", metavar="JSON", help="more fields for every request")
    add("--vocab-size", type=int, default=30_000, help="prompts of ids are below this [30000]")
    add("--seed", type=int, default=0, help="of lengths, arrivals and prompts [0]")
    add("--timeout", type=float, default=600.0, metavar="S", help="for each request [600]")
    add("--slo-ttft-ms", type=float, metavar="MS", help="for goodput: time to first token")
    add("--slo-tpot-ms", type=float, metavar="MS", help="for goodput: time per output token")
    add("--slo-e2e-ms", type=float, metavar="MS", help="for goodput: the whole answer")
    add("--record", type=Path, metavar="FILE", help="append the JSON lines to FILE")
    add("--plot", type=Path, metavar="DIR", help="write latency.png and timeline.png to DIR")
    add("--histogram", action="store_true", help="draw distributions in the terminal")
    return parser

"""What streams looked like within a window of time: first tokens, gaps, goodput, capacity.

Streams are followed while they run, so a window neither waits for long answers nor forgets them.
Must not know: how requests were sent. Entry points: `Stream`, `Window`.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from octavo.cli.percentiles import percentiles
from octavo.cli.serve_client import Outcome


class Slo(NamedTuple):
    """What a stream must keep to count as good."""

    ttft_ms: float
    tpot_ms: float


class Stream(NamedTuple):
    """A request so far. `times_s`: of its frames; `num_tokens`: of a whole answer, else 0."""

    due_s: float
    lag_s: float
    num_prompt_tokens: int
    times_s: "array[float]"
    num_tokens: int
    error: str | None

    @classmethod
    def of(cls, outcome: Outcome, *, is_over: bool) -> "Stream":
        timing = outcome.timing
        times_s = array("d")
        if timing.first_s:
            times_s.append(timing.first_s)
            for gap_s in timing.gaps_s:
                times_s.append(times_s[-1] + gap_s)
        num_tokens = timing.num_output_tokens if is_over and outcome.error is None else 0
        due_s, lag_s = timing.submitted_s, outcome.lag_s
        prompt_tokens = timing.num_prompt_tokens
        return cls(due_s, lag_s, prompt_tokens, times_s, num_tokens, outcome.error)


@dataclass(frozen=True, slots=True)
class Window:
    """[start_s, end_s), looked at when it is `seen_s`: first tokens may come a little later."""

    streams: Sequence[Stream]
    start_s: float
    end_s: float
    seen_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def arrived(self) -> list[Stream]:
        """Streams whose request was due in the window."""
        return [s for s in self.streams if self.start_s <= s.due_s < self.end_s]

    def ttfts_s(self) -> list[float]:
        """Of what arrived and wasn't refused; what still waits counts as long as it waits."""
        return [
            (s.times_s[0] if s.times_s else self.seen_s) - s.due_s
            for s in self.arrived()
            if s.error is None
        ]

    def gaps_s(self) -> list[float]:
        """Between the frames of a stream, by when the later one came."""
        return [
            later - earlier
            for s in self.streams
            for earlier, later in zip(s.times_s, s.times_s[1:], strict=False)
            if self.start_s <= later < self.end_s
        ]

    def num_good(self, slo: Slo) -> int:
        """Of what arrived: first token and mean gap, as far as its answer came, within `slo`."""
        return sum(
            s.error is None
            and bool(s.times_s)
            and 1e3 * (s.times_s[0] - s.due_s) <= slo.ttft_ms
            and 1e3 * (s.times_s[-1] - s.times_s[0]) <= slo.tpot_ms * max(1, len(s.times_s) - 1)
            for s in self.arrived()
        )

    def tokens_per_frame(self) -> float:
        """Of the whole answers; what is ready together travels in one frame."""
        whole = [s for s in self.streams if s.num_tokens]
        num_frames = sum(len(s.times_s) for s in whole)
        return sum(s.num_tokens for s in whole) / num_frames if num_frames else 1.0

    def output_tokens_per_s(self) -> float:
        frames = sum(_count(s.times_s, self.start_s, self.end_s) for s in self.streams)
        return frames * self.tokens_per_frame() / self.seconds

    def prompt_tokens_per_s(self) -> float:
        """Of the prompts whose first token came in the window."""
        begun = (s for s in self.streams if s.times_s)
        tokens = (s.num_prompt_tokens for s in begun if self._has(s.times_s[0]))
        return sum(tokens) / self.seconds

    def requests_per_s(self, mean_prompt_tokens: float, mean_output_tokens: float) -> float:
        """Requests of such lengths served: the mean of what prompts and answers say."""
        prompts = self.prompt_tokens_per_s() / mean_prompt_tokens
        return (prompts + self.output_tokens_per_s() / mean_output_tokens) / 2

    def to_record(self, slo: Slo) -> dict[str, Any]:
        arrived, gaps_s = self.arrived(), self.gaps_s()
        itl_ms = percentiles([1e3 * gap for gap in gaps_s])
        num_good = self.num_good(slo)
        return {
            "window_s": round(self.seconds, 3),
            "num_requests": len(arrived),
            "req_s": round(len(arrived) / self.seconds, 3),
            "ttft_ms": percentiles([1e3 * ttft for ttft in self.ttfts_s()]),
            "itl_ms": itl_ms,
            "itl_p99_over_p50": round(itl_ms["p99"] / itl_ms["p50"], 3) if itl_ms else None,
            "num_gaps": len(gaps_s),
            "num_waiting": sum(not s.times_s and s.error is None for s in arrived),
            "errors": dict(Counter(s.error for s in arrived if s.error)),
            "out_tok_s": round(self.output_tokens_per_s(), 1),
            "in_tok_s": round(self.prompt_tokens_per_s(), 1),
            "tokens_per_frame": round(self.tokens_per_frame(), 3),
            "slo": slo._asdict(),
            "good_fraction": round(num_good / max(1, len(arrived)), 4),
            "goodput_req_s": round(num_good / self.seconds, 3),
            "send_lag_ms": percentiles([1e3 * s.lag_s for s in arrived]),
        }

    def _has(self, time_s: float) -> bool:
        return self.start_s <= time_s < self.end_s


def _count(times_s: Iterable[float], start_s: float, end_s: float) -> int:
    return sum(start_s <= time_s < end_s for time_s in times_s)

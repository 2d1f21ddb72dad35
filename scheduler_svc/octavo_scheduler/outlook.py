"""When the rows that run now will make room for those that wait.

A queue is measured as if it drained evenly (`pace.py`). But rows that began together end together:
then nothing leaves the queue for as long as an answer takes, and much at once. So it matters how
far the answers are by now. The k-th of n rows to end is expected when the answer that is k-th
nearest to its end has gone the share of itself that it lacks; after n more the rows have all
changed hands once, and it begins again.

Must not know: workers, queues, clocks. Entry point: `Outlook`.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Shares = npt.NDArray[np.float64]


def _no_shares() -> Shares:
    return np.zeros(0)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the workers of a cell let expect; 0 = not known.

    `tokens_per_s` of prompts that all compute together, and `worker_token_s` that one takes for a
    token; `rows_per_s` that end; `left` [all rows]: the share of its answer that each still has to
    draw, in order; empty while a row is free, since then rows aren't what others wait for.
    """

    tokens_per_s: float = 0.0
    worker_token_s: float = 0.0
    rows_per_s: float = 0.0
    left: Shares = field(default_factory=_no_shares)

    def drain_tokens_per_s(self, tokens_a_sequence: float) -> float:
        """How fast a queue of such prompts should drain, for as long as it wasn't measured."""
        rates = (self.tokens_per_s, self.rows_per_s * tokens_a_sequence)
        return min((rate for rate in rates if rate), default=0.0)

    def bunching(self, num_ahead: int) -> float:
        """How many times as long as in an even queue one waits who has so many before it.

        Never below 1: rows that end sooner than expected are no promise.
        """
        num_rows = self.left.size
        if not num_rows or num_ahead < 1:
            return 1.0
        num_turns, k = divmod(num_ahead, num_rows)
        return max(1.0, num_rows * (num_turns + float(self.left[k])) / num_ahead)

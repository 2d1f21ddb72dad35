"""Blocks that rows will come to need: how long answers get, and when most is needed at once.

Admitting by the prompt alone fills the pool with rows that then push one another out. Admitting
by max_tokens leaves most of it empty. Between the two lies what is likely: each row's length is
expected from recent answers, and rows end one after the other, each giving its blocks back
("Past-Future Scheduler for LLM Serving under SLA Guarantees", Gong et al., 2025). What comes
otherwise is what preemption is for.

Legend: S rows, B block size. Must not know: workers, queues, time. Entry points:
`OutputLengths`, `peak_blocks`.
"""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# An answer counts as much as the mean of those before, until there are so many.
_MEMORY = 50
# Assumed before answers have ended: the whole of short ones, part of long ones.
_FIRST_SHARE, _FIRST_TOKENS = 1.0, 256.0
# An answer is taken to be at most this many times as long as a recent one.
_LONGEST = 2.0


class OutputLengths:
    """What recent answers say of the next one's length."""

    def __init__(self) -> None:
        self._num_seen = 1
        self._share = _FIRST_SHARE  # of max_tokens
        self._tokens = _FIRST_TOKENS

    def observe(self, num_tokens: int, max_tokens: int) -> None:
        """An answer ended by itself after `num_tokens` of at most `max_tokens`."""
        if max_tokens <= 0:
            return
        self._num_seen = min(self._num_seen + 1, _MEMORY)
        self._share += (num_tokens / max_tokens - self._share) / self._num_seen
        self._tokens += (num_tokens - self._tokens) / self._num_seen

    def expect(self, max_tokens: int) -> int:
        """Tokens of an answer that may have `max_tokens`."""
        return min(max_tokens, int(min(self._share * max_tokens, _LONGEST * self._tokens)) + 1)


def peak_blocks(remaining: Ints, slack: Ints, returned: Ints, block_size: int) -> int:
    """The most blocks, beyond those held now, that these rows hold together at a later time.

    All [S]: tokens that each row still draws; KV slots that it has for them already; blocks that
    are free again when it ends. All rows draw a token a step; each has its last block half full,
    on average.
    """
    if not remaining.size:
        return 0
    order = np.argsort(-remaining, kind="stable")
    steps, slots = remaining[order], slack[order]
    # At the moment when row k ends, rows 0..k have drawn `steps[k]` each, the others have left.
    num_rows = np.arange(1, steps.size + 1)
    grown = num_rows * steps - np.cumsum(np.minimum(slots, steps))
    left = returned.sum() - np.cumsum(returned[order])
    blocks = -(-grown // block_size) + num_rows // 2 - left
    return max(0, int(blocks.max()))

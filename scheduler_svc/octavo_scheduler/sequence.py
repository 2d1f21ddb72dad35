"""A request and its sequences, as the scheduler knows them: token ids, never text.

`Sequence.token_ids` holds the known tokens (prompt, then generated). While the sequence holds
a row, its newest tokens, less than a block of them, lie in the row's tail (`rows.py`) and are
flushed here at every block border and when the row is given up.

    num_sealed * B <= num_computed <= num_planned <= known tokens

Must not know: workers, protos, time sources. Entry points: `Request`, `Sequence`.
"""

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum, auto

from octavo.blocks import block_hash
from octavo.cancel_reason import CancelReason
from octavo.metric_kinds import Exemplar
from octavo_scheduler.sequence_trace import SequenceTrace, SubmissionTrace

# Priorities beyond +- this are taken for it.
MAX_PRIORITY = 16


class State(Enum):
    """Where a sequence is; each has exactly one way out to ENDED."""

    WAITING = auto()  # in the queue
    RUNNING = auto()  # holds a row
    LEAVING = auto()  # preempted; plans in flight may still draw tokens for it
    ENDED = auto()


class Lost(Enum):
    """Why KV that was computed for a sequence is gone; values are metric labels."""

    PREEMPTION = "preemption"
    MOVE = "move"  # with its worker
    RESUME = "resume"  # with its scheduler


class FinishReason(Enum):
    """Terminal outcomes of an accepted sequence; values are metric labels."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    # Another scheduler goes on with it; its session is told so as a whole.
    MOVED = "moved"


# What a sequence that a router cancels ends as.
CANCELLED_AS = {
    CancelReason.CLIENT: FinishReason.CANCELLED,
    CancelReason.STOP: FinishReason.STOP,
    CancelReason.DEADLINE: FinishReason.DEADLINE,
}


@dataclass(frozen=True, slots=True)
class Resume:
    """What a sequence already delivered before it was submitted here."""

    sequence_index: int
    delivered_token_ids: bytes
    finished: bool


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as it comes in; `prompt_token_ids` is packed u32, `sampling` opaque."""

    handle: int
    request_id: str
    prompt_token_ids: bytes
    root_hash: bytes
    block_hashes: tuple[bytes, ...]
    sampling: bytes
    max_tokens: int
    min_tokens: int
    ending_ids: frozenset[int]
    num_sequences: int = 1
    deadline_ms: int | None = None
    tenant: str = ""
    priority: int = 0
    resumes: tuple[Resume, ...] = ()
    # Who had it before; "" = nobody.
    lost_scheduler_id: str = ""
    # Workers that died there as they began it.
    num_suspicions: int = 0
    # Rows must be told all known tokens (penalties, bad words); the prompt is to be reported.
    needs_history: bool = False
    wants_prompt_logprobs: bool = False
    trace: SubmissionTrace | None = None


@dataclass(slots=True, eq=False)
class Request:
    """An accepted request; it lives until its last sequence ends."""

    submission: Submission
    session_id: int
    serial: int
    arrival: float
    deadline: float | None
    num_prompt_tokens: int
    # Of its trace, if that is sampled: shown beside the times that it took.
    exemplar: Exemplar = None
    # Seconds to its first token that were expected as it was queued; None = nothing was before it.
    expected_ttft_s: float | None = None
    sequences: list["Sequence"] = field(default_factory=list["Sequence"])

    @property
    def max_total_tokens(self) -> int:
        return self.num_prompt_tokens + self.submission.max_tokens

    @property
    def num_live(self) -> int:
        return sum(sequence.state is not State.ENDED for sequence in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """One generation of a request."""

    request: Request
    index: int
    token_ids: "array[int]"
    block_hashes: list[bytes]
    # Prompt tokens that the queue counts for it (siblings expect to hit the cache).
    queue_tokens: int
    state: State = State.WAITING
    row: int = -1
    block_ids: list[int] = field(default_factory=list[int])
    num_cached: int = 0
    num_planned: int = 0
    num_computed: int = 0
    num_sealed: int = 0
    num_preemptions: int = 0
    num_moves: int = 0
    num_suspicions: int = 0
    is_suspect: bool = False
    was_started: bool = False
    admitted_at: float = 0.0
    started_at: float = 0.0
    first_token_at: float = 0.0
    # Tokens whose KV was computed when it was lost; `lost_by` is for the next start to count.
    num_lost: int = 0
    lost_by: Lost | None = None
    # Tokens of its answer that were reckoned with when it got a row.
    expected_output: int = 0
    # Of these, what its tenant was charged for.
    charged_output: int = 0
    # Position of the prompt token whose log-probability is reported next; 0 = not by it.
    next_reported: int = 0
    trace: SequenceTrace | None = None

    @property
    def reports_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still owed: it then computes all of it."""
        return 0 < self.next_reported < self.request.num_prompt_tokens

    @property
    def num_generated(self) -> int:
        """Flushed generated tokens; exact when the sequence holds no row."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def order(self) -> tuple[int, int, int]:
        """Who goes first, and who is preempted last: priority, then arrival, then index."""
        return (-self.request.submission.priority, self.request.serial, self.index)

    @property
    def max_total_tokens(self) -> int:
        return self.request.max_total_tokens

    def lose_kv(self, num_computed: int, lost_by: Lost | None) -> None:
        """It has no row and no blocks any more; None: it won't need them again."""
        self.num_lost, self.lost_by = num_computed, lost_by
        self.block_ids = []
        self.num_sealed = self.num_computed = self.num_planned = 0

    def extend_hashes(self, block_size: int) -> None:
        """Hash the full blocks of `token_ids` that have no hash yet."""
        parent = self.block_hashes[-1] if self.block_hashes else self.request.submission.root_hash
        for i in range(len(self.block_hashes), len(self.token_ids) // block_size):
            start = i * block_size
            parent = block_hash(parent, self.token_ids[start : start + block_size].tobytes())
            self.block_hashes.append(parent)


def make_sequences(request: Request, block_size: int) -> list[Sequence]:
    """The sequences that are still to be generated, delivered tokens included."""
    submission = request.submission
    resumes = {resume.sequence_index: resume for resume in submission.resumes}
    sequences: list[Sequence] = []
    for index in range(submission.num_sequences):
        resume = resumes.get(index)
        if resume is not None and resume.finished:
            continue
        token_ids = array("I", submission.prompt_token_ids)
        if resume is not None:
            token_ids.frombytes(resume.delivered_token_ids)
        is_first = not sequences
        tokens = len(token_ids) if is_first else min(len(token_ids), block_size)
        hashes = list(submission.block_hashes)
        sequence = Sequence(request, index, token_ids, hashes, queue_tokens=tokens)
        sequence.num_suspicions = submission.num_suspicions
        sequence.is_suspect = submission.num_suspicions > 0
        # The prompt is reported once a request, before the first sequence's first token: one
        # that delivered a token has done it.
        is_reporter = submission.wants_prompt_logprobs and index == 0
        sequence.next_reported = int(is_reporter and not sequence.num_generated)
        if sequence.num_generated:
            sequence.lose_kv(len(token_ids) - 1, Lost.RESUME)
        if submission.trace is not None:
            sequence.trace = submission.trace.of_sequence(index)
        sequences.append(sequence)
    return sequences


def already_ended(sequence: Sequence) -> FinishReason | None:
    """Whether what a resumed sequence delivered was its whole answer."""
    submission = sequence.request.submission
    num_generated = sequence.num_generated
    if num_generated > submission.min_tokens and sequence.token_ids[-1] in submission.ending_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_generated >= submission.max_tokens else None


def order_of(sequences: SequenceOf[Sequence]) -> list[Sequence]:
    """First served first."""
    return sorted(sequences, key=lambda sequence: sequence.order)

"""Which prompt tokens a chunk tells the log-probabilities of.

The hidden state of position i gives the distribution of token i + 1; so a chunk [start, end)
tells of the tokens [start + 1, end + 1) as far as they are the prompt's, and a prompt's first
token has none. A chunk's last state tells of a token that comes only with the next chunk, which
is why rows that ask for these bring their history.

Must not know: tensors (`prompt_logprobs` computes the values). Entry point: `piece_of`.
"""

from dataclasses import dataclass

from octavo_worker.plan import I64, Chunk, RowAdd


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """The prompt tokens [start, start + len(token_ids)) of a row."""

    row: int
    generation: int
    start: int
    token_ids: I64
    # Index in the step's tokens of the state that tells of the first one.
    first_state: int
    num_alternatives: int


def piece_of(add: RowAdd, chunk: Chunk, first_state: int) -> PromptPiece | None:
    """The piece of a chunk whose tokens begin at `first_state`; None if it tells of none."""
    wanted = add.sampling.prompt_logprobs
    start, end = chunk.start + 1, min(chunk.end + 1, add.num_prompt_tokens)
    if wanted is None or start >= end:
        return None
    token_ids = add.history_token_ids[start:end]
    return PromptPiece(add.row, add.generation, start, token_ids, first_state, wanted)

"""Read this first: the life of a request in the router.

    HTTP (chat, completions) ─┐                        ┌─▶ SSE frames or one JSON body
    gRPC (grpc_api) ──────────┴─▶ GenerateRequest      │
                                        │              │
      validate   params, requests       │          Generation.news(): text, ids, logprobs
      render     the chat template  ┐   ▼              ▲
      tokenize   text to ids        ├ in a thread   detokenizer, stop strings
      hash       the full blocks    │   │              ▲
      choose     the cell (cells)   ┘   ▼              │
      submit     Sessions.submit ──▶ Flight ◀── Session's reader (ids only)

A door (app, grpc_api) validates with `params` and `requests` and gives the pipeline a frozen
`GenerateRequest`. The pipeline makes one flight per prompt, with everything resolved: nothing is
left to a default further down. The session's reader fills flights, `Generation` empties them.
The event loop never renders, tokenizes or hashes. Must not know: HTTP, protos.
Entry points: `Pipeline.start`, `Pipeline.tokenize`.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.errors import ContextLengthError, InvalidRequestError
from octavo_router.cells import Cell, CellChoice, choose_cell
from octavo_router.flights import Flight, Inbox, PromptOrder, ResolvedSampling
from octavo_router.generation import Generation
from octavo_router.outcomes import RequestRecord
from octavo_router.requests import ChatPrompt, GenerateRequest, IdsPrompt, Prompt
from octavo_router.served_model import PromptHashes, ServedModel
from octavo_router.sessions import Sessions
from octavo_router.tokenizer import Tokenizer

MAX_CHOICES = 4096
_SEED_PERSON = b"octavo.seed"


class _Prepared(NamedTuple):
    """A prompt ready to go. `token_ids`: [T] u32."""

    token_ids: npt.NDArray[np.uint32]
    hashes: PromptHashes
    choice: CellChoice | None


class Pipeline:
    """Turns validated requests into generations. `executor`: where text is worked on."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        sessions: Sessions,
        executor: Executor,
        share_prefixes: bool,
    ) -> None:
        self.tokenizer = tokenizer
        self.sessions = sessions
        self._executor = executor
        self._share_prefixes = share_prefixes

    async def start(self, request: GenerateRequest, record: RequestRecord) -> Generation:
        """Tokenize, hash, choose a cell and submit; the caller must `close` the result.

        Raises OctavoError; then nothing runs anywhere.
        """
        loop = asyncio.get_running_loop()
        deadline = None if request.timeout_s is None else loop.time() + request.timeout_s
        sampling = request.sampling
        num_choices = len(request.prompts) * sampling.n
        if num_choices > MAX_CHOICES:
            raise InvalidRequestError(
                f"n times prompts must be at most {MAX_CHOICES}, got {num_choices}", param="n"
            )
        model = await self.sessions.wait_ready()
        tenant = None if self._share_prefixes else request.tenant or None
        started_at = time.perf_counter()
        cells = self.sessions.cells()
        prepared = await self._in_thread(self._prepare, request.prompts, model, tenant, cells)
        num_prompt_tokens = sum(len(item.token_ids) for item in prepared)
        record.prompt(num_prompt_tokens, time.perf_counter() - started_at)
        inbox = Inbox()
        flights: list[Flight] = []
        for position, item in enumerate(prepared):
            order = PromptOrder(
                request_id=request.request_id,
                token_ids=item.token_ids,
                model=model,
                hashes=item.hashes,
                hash_tenant=tenant,
                sampling=resolve_sampling(request, model, len(item.token_ids), position),
                num_sequences=sampling.n,
                tenant=request.tenant,
                deadline=deadline,
            )
            is_quiet = not request.is_stream and not sampling.stop
            flights.append(Flight(order, inbox, is_quiet=is_quiet))
        # Every prompt is good: only now anything leaves.
        generation = Generation(flights, inbox, self.tokenizer, sampling.stop, record, deadline)
        try:
            for flight, item in zip(flights, prepared, strict=True):
                self.sessions.submit(flight, item.choice)
        except BaseException:
            generation.close()
            raise
        return generation

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True
    ) -> npt.NDArray[np.uint32]:
        """The ids that `start` would submit for this prompt."""
        return await self._in_thread(self._encode, prompt, add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """All of the ids as text, special ones too."""

        def decode() -> str:
            return self.tokenizer.decode(token_ids, skip_special_tokens=False)

        return await self._in_thread(decode)

    def _in_thread(self, function: Any, *arguments: Any) -> Any:
        return asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    def _encode(self, prompt: Prompt, add_special_tokens: bool = True) -> npt.NDArray[np.uint32]:
        if isinstance(prompt, IdsPrompt):
            return np.array(prompt.token_ids, dtype=np.uint32)
        if isinstance(prompt, ChatPrompt):
            return self.tokenizer.encode_chat(prompt.messages)
        return self.tokenizer.encode(prompt.text, add_special_tokens=add_special_tokens)

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        model: ServedModel,
        tenant: str | None,
        cells: Sequence[Cell],
    ) -> list[_Prepared]:
        """All that costs time: ids, hashes and the choice of a cell; in a thread."""
        prepared: list[_Prepared] = []
        for position, prompt in enumerate(prompts):
            token_ids = self._encode(prompt)
            param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
            if len(prompts) > 1:
                param = f"{param}[{position}]"
            if not len(token_ids):
                raise InvalidRequestError(
                    f"{param} has no tokens: at least one is needed", param=param
                )
            if len(token_ids) >= model.max_model_len:
                raise ContextLengthError(
                    f"{param} has {len(token_ids)} tokens, the model's context is "
                    f"{model.max_model_len} tokens: shorten it so that at least one more fits",
                    param=param,
                )
            hashes = model.hash_prompt(token_ids, tenant)
            choice = choose_cell(cells, hashes.blocks, hashes.block_size)
            prepared.append(_Prepared(token_ids, hashes, choice))
        return prepared


def resolve_sampling(
    request: GenerateRequest, model: ServedModel, num_prompt_tokens: int, position: int
) -> ResolvedSampling:
    """Sampling parameters of the request's prompt number `position`, with nothing left open.

    Raises ContextLengthError if prompt and answer don't fit into the context.
    """
    options = request.sampling
    room = model.max_model_len - num_prompt_tokens
    max_tokens = options.max_tokens
    if max_tokens is None:
        # A default is never a reason to refuse: it is what is left, in the pool too.
        pool_room = (model.max_request_tokens or model.max_model_len) - num_prompt_tokens
        max_tokens = max(min(room, pool_room, request.default_max_tokens or room), 1)
    elif max_tokens > room:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}: together "
            f"{num_prompt_tokens + max_tokens}, the model's context is {model.max_model_len} "
            f"tokens; lower max_tokens to {room} or shorten the prompt",
            param="max_tokens",
        )
    eos = () if options.ignore_eos else model.eos_token_ids
    return ResolvedSampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=_seed(request, position),
        max_tokens=max_tokens,
        stop_token_ids=tuple(dict.fromkeys((*options.stop_token_ids, *eos))),
        logprobs=options.logprobs,
    )


def _seed(request: GenerateRequest, position: int) -> int:
    """The prompt's u64 seed: given, or derived so that a retry draws the same, or random.

    A given seed holds for every prompt of a list: each then draws what it would draw alone.
    """
    if request.sampling.seed is not None:
        return request.sampling.seed % 2**64
    if not request.idempotency_key:
        return secrets.randbits(64)
    parts = (request.tenant, request.idempotency_key, str(position))
    data = "".join(f"{len(part)}:{part}" for part in parts).encode()
    return int.from_bytes(blake2b(data, digest_size=8, person=_SEED_PERSON).digest(), "little")

"""Read this first: the life of a request in the router.

    HTTP (chat, completions) ─┐                        ┌─▶ SSE frames or one JSON body
    gRPC (grpc_api) ──────────┴─▶ GenerateRequest      │
                                        │              │
      validate   requests, params       │          Generation.news(): text, ids, logprobs
      render     the chat template  ┐   ▼              ▲
      tokenize   prompts            ├ in a thread   detokenizer, stop strings
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
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.blocks import salt_of
from octavo.errors import InvalidRequestError
from octavo_router.cells import Cell, CellChoice, choose_cell
from octavo_router.flights import Flight, Inbox, PromptEcho, PromptOrder, ResolvedSampling
from octavo_router.generation import Generation
from octavo_router.meter import Charge
from octavo_router.outcomes import RequestRecord
from octavo_router.prompts import (
    check_length,
    check_size,
    check_text,
    echo_of,
    encode,
    encode_bad_words,
    resolve_sampling,
    truncate,
)
from octavo_router.quotas import Quotas
from octavo_router.request_trace import PromptTimes, RequestTrace
from octavo_router.requests import ChatPrompt, GenerateRequest, Prompt
from octavo_router.served_model import PromptHashes, ServedModel
from octavo_router.sessions import Sessions
from octavo_router.tokenizer import Tokenizer

MAX_CHOICES = 4096


class _Prepared(NamedTuple):
    """A prompt ready to go. `token_ids`: [T] u32."""

    token_ids: npt.NDArray[np.uint32]
    hashes: PromptHashes
    choice: CellChoice | None
    echo: PromptEcho | None
    sampling: ResolvedSampling


class Pipeline:
    """Turns validated requests into generations. `executor`: where text is worked on."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        sessions: Sessions,
        executor: Executor,
        share_prefixes: bool,
        quotas: Quotas | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.sessions = sessions
        self._executor = executor
        self._share_prefixes = share_prefixes
        self._quotas = quotas

    async def start(self, request: GenerateRequest, record: RequestRecord) -> Generation:
        """Tokenize, hash, choose a cell and submit; the caller must `close` the result.

        Raises OctavoError; then nothing runs anywhere.
        """
        record.request_id = request.request_id
        if record.trace is not None:
            record.trace.request(request)
        loop = asyncio.get_running_loop()
        deadline = None if request.timeout_s is None else loop.time() + request.timeout_s
        fields = request.fields
        sampling = fields.sampling
        num_choices = len(fields.prompts) * sampling.n
        if num_choices > MAX_CHOICES:
            raise InvalidRequestError(
                f"n times prompts must be at most {MAX_CHOICES}, got {num_choices}", param="n"
            )
        # Clients say it as they do elsewhere: smaller comes first.
        priority = -fields.priority
        self.sessions.check_room(request.tenant, priority)
        charge = self._charge(request)
        try:
            return await self._start(request, record, deadline, priority, num_choices, charge)
        except BaseException:
            if charge is not None:
                charge.cancel()
            raise

    def _charge(self, request: GenerateRequest) -> Charge | None:
        """Count the request. Raises RateLimitError if its tenant's quota is used up."""
        meter = None if self._quotas is None else self._quotas.meter(request.tenant)
        return None if meter is None else meter.begin()

    async def _start(
        self,
        request: GenerateRequest,
        record: RequestRecord,
        deadline: float | None,
        priority: int,
        num_choices: int,
        charge: Charge | None,
    ) -> Generation:
        fields = request.fields
        sampling = fields.sampling
        model = await self.sessions.wait_ready()
        salt = salt_of(None if self._share_prefixes else request.tenant or None, fields.cache_salt)
        trace = record.trace
        started_at = time.perf_counter()
        cells = self.sessions.cells()
        prepared = await self._in_thread(self._prepare, request, model, salt, cells, trace)
        num_prompt_tokens = sum(len(item.token_ids) for item in prepared)
        record.prompt(num_prompt_tokens, time.perf_counter() - started_at)
        if charge is not None:
            charge.take_tokens(num_prompt_tokens + (sampling.max_tokens or 0) * num_choices)
        if trace is not None:
            trace.sampling(prepared[0].sampling, num_prompt_tokens)
        inbox = Inbox()
        flights = [
            self._flight(request, item, inbox, model, salt, deadline, priority, trace)
            for item in prepared
        ]
        # Every prompt is good: only now anything leaves.
        generation = Generation(
            flights,
            inbox,
            self.tokenizer,
            sampling.stop,
            record,
            deadline,
            options=fields.answer,
            is_scoring=sampling.max_tokens == 0,
            charge=charge,
        )
        try:
            for flight, item in zip(flights, prepared, strict=True):
                self.sessions.submit(flight, item.choice)
        except BaseException:
            generation.close()
            raise
        return generation

    def _flight(
        self,
        request: GenerateRequest,
        prepared: _Prepared,
        inbox: Inbox,
        model: ServedModel,
        salt: str | None,
        deadline: float | None,
        priority: int,
        trace: RequestTrace | None,
    ) -> Flight:
        """One prompt's flight, not yet submitted."""
        sampling = request.fields.sampling
        order = PromptOrder(
            request_id=request.request_id,
            token_ids=prepared.token_ids,
            model=model,
            hashes=prepared.hashes,
            hash_salt=salt,
            sampling=prepared.sampling,
            num_sequences=sampling.n,
            tenant=request.tenant,
            deadline=deadline,
            priority=priority,
            echo=prepared.echo,
            trace=trace,
        )
        is_quiet = not request.is_stream and not sampling.stop
        return Flight(order, inbox, is_quiet=is_quiet)

    async def tokenize(self, prompt: Prompt) -> npt.NDArray[np.uint32]:
        """The ids that `start` would submit for this prompt."""
        param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        check = partial(check_size, param)
        return await self._in_thread(encode, self.tokenizer, prompt, check)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """All of the ids as text, special ones too."""

        def decode() -> str:
            return self.tokenizer.decode(token_ids, skip_special_tokens=False)

        return await self._in_thread(decode)

    def _in_thread(self, function: Any, *arguments: Any) -> Any:
        return asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    def _prepare(
        self,
        request: GenerateRequest,
        model: ServedModel,
        salt: str | None,
        cells: Sequence[Cell],
        trace: RequestTrace | None,
    ) -> list[_Prepared]:
        """All that costs time: ids, hashes and the choice of a cell; in a thread."""
        fields = request.fields
        bad_word_ids = encode_bad_words(self.tokenizer, fields.sampling.rules.bad_words)
        # A tokenizer may have ids that the model's own vocabulary hasn't.
        end_ids = tuple(i for i in self.tokenizer.eos_token_ids if i < model.vocab_size)
        prepared: list[_Prepared] = []
        for position, prompt in enumerate(fields.prompts):
            started_ns = time.time_ns()
            param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
            if len(fields.prompts) > 1:
                param = f"{param}[{position}]"
            check = partial(check_text, self.tokenizer, param, fields, model)
            whole = encode(self.tokenizer, prompt, check)
            token_ids = truncate(whole, request, model)
            check_length(param, len(token_ids), model)
            echo = None
            if fields.answer.echo:
                is_cut = len(token_ids) < len(whole)
                echo = echo_of(self.tokenizer, prompt, token_ids, is_cut=is_cut)
            hashes = model.hash_prompt(token_ids, salt)
            tokenized_ns = time.time_ns()
            choice = choose_cell(cells, hashes.blocks, hashes.block_size)
            if trace is not None:
                times = PromptTimes(started_ns, tokenized_ns, time.time_ns())
                trace.prepared(position, times, len(token_ids), hashes.blocks, cells, choice)
            sampling = resolve_sampling(
                request, model, len(token_ids), position, bad_word_ids, end_ids
            )
            prepared.append(_Prepared(token_ids, hashes, choice, echo, sampling))
        return prepared

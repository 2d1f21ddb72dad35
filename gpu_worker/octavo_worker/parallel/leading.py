"""Rank 0's side: the runner that the engine drives, and that takes all others along.

Whatever the engine asks of it goes to the other ranks first and is then done here; nothing comes
back, and no rank ever waits for another but in a step's own collectives. Read this first, then
`following`. Entry points: `LeadingGroup`, `LeadingRunner`.
"""

import logging
import struct
from collections.abc import Callable
from pathlib import Path

import torch

from octavo.errors import ConfigurationError, UnavailableError
from octavo.settings import WorkerSettings
from octavo_worker.backends.base import Backend
from octavo_worker.models.config import ModelConfig
from octavo_worker.parallel.commands import Command, Kind, encode
from octavo_worker.parallel.launch import Fellows
from octavo_worker.parallel.places import Place
from octavo_worker.parallel.ranks import join
from octavo_worker.plan import Plan, StepOutcome
from octavo_worker.row_limits import RowLimits
from octavo_worker.runner import KVCaches, Model, Runner

_logger = logging.getLogger(__name__)
COUNT = struct.Struct("<q")
# The watchdog thread of NCCL asks for events while a graph is captured.
CAPTURE_ERROR_MODE = "thread_local"


class LeadingGroup:
    """Rank 0's place among the ranks; see `loading.RankGroup`."""

    def __init__(
        self,
        settings: WorkerSettings,
        on_fatal: Callable[[str], None],
        folder: Path,
        device: torch.device,
    ) -> None:
        """Start or await the others.

        Raises ConfigurationError if the model of `folder` or the cards can't be shared out,
        UnavailableError if one of the ranks doesn't get this far.
        """
        place = Place.here(settings.tensor_parallel)
        place.share.of_config(ModelConfig.from_folder(folder))
        _require_cards(place, device)
        self._fellows = Fellows(settings, place, on_fatal)
        store = self._fellows.store
        self.exchange = join(place, store, device, on_loopback=place.is_alone)
        _logger.info("%d ranks share the model", place.share.size)

    def agree(self, number: int) -> int:
        """The least of every rank's numbers."""
        numbers = [number]
        for link in self._fellows.links:
            message = link.receive()
            if message is None:
                raise UnavailableError(f"rank {link.rank} ended while loading")
            numbers += COUNT.unpack(message)
        self._fellows.tell(COUNT.pack(min(numbers)))
        return min(numbers)

    def make_runner(
        self,
        model: Model,
        backend: Backend,
        kv_caches: KVCaches,
        limits: RowLimits,
        device: torch.device,
    ) -> Runner:
        return LeadingRunner(self._fellows, model, backend, kv_caches, limits, device)


class LeadingRunner(Runner):
    """A runner over rank 0's share of the model: the other ranks do as it does."""

    def __init__(
        self,
        fellows: Fellows,
        model: Model,
        backend: Backend,
        kv_caches: KVCaches,
        limits: RowLimits,
        device: torch.device,
    ) -> None:
        super().__init__(model, backend, kv_caches, limits, device)
        self._fellows = fellows
        self._num_read = 0

    def submit(self, plan: Plan | None, arrived_ns: int | None = None) -> None:
        self._tell(Kind.SUBMIT, plan)
        super().submit(plan, arrived_ns)

    def poll(self, *, wait: bool = True) -> StepOutcome | None:
        outcome = super().poll(wait=wait)
        # What a result says of dead rows counts from here on: for the others, from their next
        # command on.
        self._num_read += outcome is not None
        return outcome

    def reset(self) -> None:
        self._tell(Kind.RESET)
        super().reset()

    def capture(self, error_mode: str = CAPTURE_ERROR_MODE) -> None:
        self._tell(Kind.CAPTURE)
        super().capture(error_mode)

    def close(self) -> None:
        self._fellows.close(encode(Command(Kind.END, self._num_read)))

    def _tell(self, kind: Kind, plan: Plan | None = None) -> None:
        self._fellows.tell(encode(Command(kind, self._num_read, plan)))
        self._num_read = 0


def _require_cards(place: Place, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < place.num_local:
        raise ConfigurationError(
            f"OCTAVO_TENSOR_PARALLEL={place.share.size}: {place.num_local} cards are needed on "
            f"this machine, torch finds {torch.cuda.device_count()}",
            param="tensor_parallel",
        )

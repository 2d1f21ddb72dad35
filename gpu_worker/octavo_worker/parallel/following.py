"""The other ranks' side: a process that does what rank 0 tells it, until that is gone.

It has no server, no engine and no leader; signals are rank 0's business. Entry point: `follow`.
"""

import gc
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import torch

from octavo.logs import setup_logging
from octavo.settings import WorkerSettings
from octavo_worker.backends.base import Backend
from octavo_worker.loading import load_runner
from octavo_worker.parallel.commands import Kind, decode
from octavo_worker.parallel.launch import reach_leader
from octavo_worker.parallel.leading import CAPTURE_ERROR_MODE, COUNT
from octavo_worker.parallel.links import Link, wait_hang_up
from octavo_worker.parallel.places import KEY, Place
from octavo_worker.parallel.ranks import join, open_store
from octavo_worker.row_limits import RowLimits
from octavo_worker.runner import KVCaches, Model, Runner

_LAST_WORDS_S = 1.0


def follow(settings: WorkerSettings, place: Place) -> int:
    """Be rank `place.share.rank` until rank 0 ends; the exit status is 0 if it did in order.

    Raises ConfigurationError for what can't be loaded.
    """
    # Rank 0 says the same of the same things.
    level = settings.log_level if settings.log_level in ("debug", "error") else "warning"
    setup_logging(f"rank {place.share.rank}", level, settings.log_format)
    for number in (signal.SIGINT, signal.SIGTERM):
        # A service manager may signal every process; rank 0 needs the others until it has drained.
        signal.signal(number, signal.SIG_IGN)
    make_group = partial(FollowingGroup, settings, place)
    loaded = load_runner(settings, make_group, card=place.local_rank)
    assert loaded.group is not None
    gc.collect()
    gc.freeze()
    return _obey(loaded.group.link, loaded.runner)


class FollowingGroup:
    """Another rank's place among them; see `loading.RankGroup`."""

    def __init__(
        self,
        settings: WorkerSettings,
        place: Place,
        folder: Path,  # noqa: ARG002 - rank 0 has looked at it
        device: torch.device,
    ) -> None:
        store = open_store(place)
        self.link = reach_leader(settings, place, store)
        threading.Thread(target=_die_with, args=(self.link,), name="leader", daemon=True).start()
        is_beside = KEY in os.environ
        self.exchange = join(place, store, device, on_loopback=is_beside)

    def agree(self, number: int) -> int:
        """See `LeadingGroup.agree`."""
        self.link.send(COUNT.pack(number))
        message = self.link.receive()
        if message is None:
            raise SystemExit(1)
        return COUNT.unpack(message)[0]

    def make_runner(
        self,
        model: Model,
        backend: Backend,
        kv_caches: KVCaches,
        limits: RowLimits,
        device: torch.device,
    ) -> Runner:
        return Runner(model, backend, kv_caches, limits, device)


def _obey(link: Link, runner: Runner) -> int:
    while (message := link.receive()) is not None:
        command = decode(message)
        for _ in range(command.num_read):
            runner.poll()
        match command.kind:
            case Kind.SUBMIT:
                runner.submit(command.plan)
            case Kind.RESET:
                runner.reset()
            case Kind.CAPTURE:
                runner.capture(CAPTURE_ERROR_MODE)
            case Kind.END:
                return 0
    return 1


def _die_with(link: Link) -> None:
    """End when rank 0 has, even in a collective that waits for it."""
    wait_hang_up([link])
    # If that was in order, its last message is read first.
    time.sleep(_LAST_WORDS_S)
    os._exit(1)

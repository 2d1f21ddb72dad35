"""From settings to a running engine: backend, model, KV cache, runner.

Slow and blocking: runs in a thread of its own. Must not know: gRPC, the registry. Entry
point: `load`.
"""

import gc
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from octavo.blocks import HASH_VERSION
from octavo.hub import model_name_of, resolve_model, revision_of
from octavo.metrics import WorkerMetrics
from octavo.settings import WorkerSettings
from octavo_worker.backends import choose_backend
from octavo_worker.engine import Engine
from octavo_worker.gpu_readings import gpu_reader
from octavo_worker.kv_cache import allocate_kv_caches, size_kv_cache
from octavo_worker.models import load_model
from octavo_worker.row_book import RowLimits
from octavo_worker.runner import Runner
from octavo_worker.spec import Capacity, Spec, kv_scheme_of
from octavo_worker.step_profile import StepProfile
from octavo_worker.warm_up import warm_up

_logger = logging.getLogger(__name__)
_MAX_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
# On a card one step runs while the next one waits in its queue.
_MAX_IN_FLIGHT = {"cpu": 1, "cuda": 2}


class Loaded(NamedTuple):
    """A model ready to run; the engine is not started yet."""

    spec: Spec
    capacity: Capacity
    engine: Engine


def load(
    settings: WorkerSettings,
    metrics: WorkerMetrics,
    on_fatal: Callable[[str], None],
    on_compiling: Callable[[], None] = lambda: None,
) -> Loaded:
    """Load what `settings` name. Raises ConfigurationError for what can't be.

    `on_compiling` is called when the weights are there and kernels compile.
    """
    began = time.monotonic()
    backend, device = choose_backend(settings.backend)
    folder = resolve_model(
        settings.model, settings.revision, weights=settings.load_format != "random"
    )
    model = load_model(
        folder,
        dtype=settings.dtype,
        device=device,
        load_format=settings.load_format,
        max_model_len=settings.max_model_len,
        progress=_ProgressLog(),
    )
    config = model.config
    max_num_batched_tokens = settings.max_num_batched_tokens or _MAX_BATCHED_TOKENS[device.type]
    size = size_kv_cache(config, settings, device, max_num_batched_tokens)
    limits = RowLimits(
        num_rows=settings.max_num_seqs,
        num_blocks=size.num_blocks,
        block_size=size.block_size,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
    )
    caches = allocate_kv_caches(config, size, device)
    runner = Runner(model, backend, caches, limits, device)
    if device.type == "cuda":
        on_compiling()
        warm_up(runner, limits, max_num_batched_tokens)
        runner.capture()
    metrics.sample_gpus(gpu_reader(device))
    if settings.profile:
        runner.profile = StepProfile()
    engine = Engine(
        runner,
        max_in_flight=_MAX_IN_FLIGHT[device.type],
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=size.num_blocks,
        metrics=metrics,
        on_fatal=on_fatal,
    )
    spec = Spec(
        name=model_name_of(settings.model),
        revision=revision_of(folder),
        block_size=size.block_size,
        kv_scheme=kv_scheme_of(config.dtype),
        hash_version=HASH_VERSION,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
    )
    capacity = Capacity(
        num_blocks=size.num_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        backend=backend.name,
        device=_device_name(device),
        kv_bytes_per_token=size.bytes_per_token,
    )
    # What was made so far lives as long as the process: the collector need not look at it.
    gc.collect()
    gc.freeze()
    _logger.info("loaded %s in %.1f s on %s", spec.name, time.monotonic() - began, capacity.device)
    return Loaded(spec, capacity, engine)


class _ProgressLog:
    """Logs each quarter of the weights once."""

    def __init__(self) -> None:
        self._num_told = 0

    def __call__(self, fraction: float) -> None:
        quarter = int(fraction * 4)
        if quarter > self._num_told:
            self._num_told = quarter
            _logger.info("loading weights: %d %%", 25 * quarter)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({torch.get_num_threads()} threads)"

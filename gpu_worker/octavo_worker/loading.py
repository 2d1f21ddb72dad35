"""From settings to a running engine: backend, model, KV cache, runner.

Slow and blocking: runs in a thread of its own. Must not know: gRPC, the registry. Entry
points: `load`; `load_runner`, for ranks that follow.
"""

import dataclasses
import gc
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import torch

from octavo.blocks import HASH_VERSION
from octavo.capacity import Capacity
from octavo.errors import ConfigurationError
from octavo.hub import model_name_of, resolve_model, revision_of
from octavo.metrics import WorkerMetrics
from octavo.model_spec import ModelSpec
from octavo.settings import WorkerSettings
from octavo_worker.backends import Backend, choose_backend
from octavo_worker.dequantized_copies import keep_copies
from octavo_worker.engine import Engine
from octavo_worker.gpu_readings import gpu_reader
from octavo_worker.kv_cache import (
    KVCacheSize,
    allocate_kv_caches,
    graph_tokens,
    kv_dtype_of,
    size_kv_cache,
)
from octavo_worker.late_compiles import LateCompiles
from octavo_worker.models import Model, ModelConfig, load_any_model
from octavo_worker.row_book import RowLimits
from octavo_worker.runner import DecodeProgram, KVCaches, Runner
from octavo_worker.spec import kv_scheme_of
from octavo_worker.step_profile import StepProfile
from octavo_worker.warm_up import warm_up
from octavo_worker.weights import Progress

if TYPE_CHECKING:
    from octavo_worker.models.fallback import FallbackConfig, FallbackModel
    from octavo_worker.parallel.sharded import Exchange

_logger = logging.getLogger(__name__)
_MAX_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
# Compute capability 8.9 brought e4m3.
_FIRST_WITH_FP8 = (8, 9)
# Capability from which kernels may start before their predecessors have ended.
_FIRST_WITH_EARLY_STARTS = (9, 0)
# On a card one step runs while the next one waits in its queue.
_MAX_IN_FLIGHT = {"cpu": 1, "cuda": 2}


class Loaded(NamedTuple):
    """A model ready to run; the engine is not started yet."""

    spec: ModelSpec
    capacity: Capacity
    engine: Engine


class RankGroup(Protocol):
    """A process's place among the ranks that share a model."""

    @property
    def exchange(self) -> "Exchange": ...

    def agree(self, number: int) -> int:
        """The least of every rank's numbers: room, KV blocks that fit."""
        ...

    def make_runner(
        self,
        model: Model,
        backend: Backend,
        kv_caches: KVCaches,
        limits: RowLimits,
        device: torch.device,
    ) -> Runner: ...


GroupT = TypeVar("GroupT", bound=RankGroup)


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedRunner(Generic[GroupT]):
    """A runner on its device, not warmed up; `config`: of this rank's part of the model."""

    runner: Runner
    folder: Path
    model: "Model | FallbackModel"
    config: "ModelConfig | FallbackConfig"
    backend: Backend
    device: torch.device
    size: KVCacheSize
    limits: RowLimits
    max_num_batched_tokens: int
    group: GroupT | None


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
    make_group = None
    if settings.tensor_parallel > 1:
        # Only here: a worker that has its model to itself imports none of it.
        from octavo_worker.parallel.leading import LeadingGroup

        make_group = partial(LeadingGroup, settings, on_fatal)
    loaded = load_runner(settings, make_group, progress=_ProgressLog())
    runner, config, size, device = loaded.runner, loaded.config, loaded.size, loaded.device
    if device.type == "cuda":
        on_compiling()
        warm_up(runner, loaded.limits, loaded.max_num_batched_tokens)
        _capture(runner, loaded.model)
        LateCompiles(metrics).watch()
    metrics.sample_gpus(gpu_reader(device))
    if settings.profile:
        runner.profile = StepProfile()
    engine = Engine(
        runner,
        max_in_flight=_MAX_IN_FLIGHT[device.type],
        max_num_batched_tokens=loaded.max_num_batched_tokens,
        num_blocks=size.num_blocks,
        metrics=metrics,
        on_fatal=on_fatal,
    )
    spec = ModelSpec(
        name=model_name_of(settings.model),
        revision=revision_of(loaded.folder),
        block_size=size.block_size,
        kv_scheme=kv_scheme_of(kv_dtype_of(config, settings)),
        hash_version=HASH_VERSION,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
    )
    capacity = Capacity(
        num_blocks=size.num_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=loaded.max_num_batched_tokens,
        backend=loaded.backend.name,
        device=_device_name(device, settings.tensor_parallel),
        kv_bytes_per_token=size.bytes_per_token * settings.tensor_parallel,
    )
    # What was made so far lives as long as the process: the collector need not look at it.
    gc.collect()
    gc.freeze()
    _logger.info("loaded %s in %.1f s on %s", spec.name, time.monotonic() - began, capacity.device)
    return Loaded(spec, capacity, engine)


def load_runner(
    settings: WorkerSettings,
    make_group: Callable[[Path, torch.device], GroupT] | None = None,
    *,
    card: int | None = None,
    progress: Progress | None = None,
) -> LoadedRunner[GroupT]:
    """This process's part of the model, ready to be warmed up; `card`: its number.

    `make_group` joins the ranks that share the model of a folder; None = there is one.
    """
    backend, device = choose_backend(settings.backend, card)
    folder = resolve_model(
        settings.model, settings.revision, weights=settings.load_format != "random"
    )
    # Tells imports and the device's own start apart from what follows.
    _logger.info("loading %s on %s", folder, device)
    group = None if make_group is None else make_group(folder, device)
    model = load_any_model(
        folder,
        impl=settings.model_impl,
        dtype=settings.dtype,
        device=device,
        load_format=settings.load_format,
        max_model_len=settings.max_model_len,
        quantization=settings.quantization,
        progress=progress,
        exchange=None if group is None else group.exchange,
    )
    config = model.config
    max_num_batched_tokens = settings.max_num_batched_tokens or _MAX_BATCHED_TOKENS[device.type]
    if isinstance(model, Model):
        agree = None if group is None else group.agree
        keep_copies(model, settings, device, max_num_batched_tokens, agree)
    size = size_kv_cache(config, settings, device, max_num_batched_tokens)
    if group is not None:
        size = dataclasses.replace(size, num_blocks=group.agree(size.num_blocks))
    limits = RowLimits(
        num_rows=settings.max_num_seqs,
        num_blocks=size.num_blocks,
        block_size=size.block_size,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
    )
    kv_dtype = kv_dtype_of(config, settings)
    if kv_dtype != config.dtype:
        _scale_kv(model, device)
    caches = allocate_kv_caches(config, size, device, kv_dtype)
    if group is None:
        runner = Runner(
            model, backend, caches, limits, device, decode=_decode_program(model, device)
        )
    else:
        assert isinstance(model, Model)
        runner = group.make_runner(model, backend, caches, limits, device)
    if isinstance(model, Model):
        runner.max_graph_tokens = graph_tokens(config, settings, max_num_batched_tokens)
    return LoadedRunner(
        runner=runner,
        folder=folder,
        model=model,
        config=config,
        backend=backend,
        device=device,
        size=size,
        limits=limits,
        max_num_batched_tokens=max_num_batched_tokens,
        group=group,
    )


def _scale_kv(model: "Model | FallbackModel", device: torch.device) -> None:
    """Raises ConfigurationError where there are no caches of 8-bit floats."""
    why = None
    if not isinstance(model, Model):
        why = "models in transformers' code have none"
    elif device.type == "cuda" and torch.cuda.get_device_capability(device) < _FIRST_WITH_FP8:
        why = "this card knows none"
    else:
        model.scale_kv()
    if why is not None:
        raise ConfigurationError(
            f"OCTAVO_KV_CACHE_DTYPE=fp8: KV caches of 8-bit floats: {why}", param="kv_cache_dtype"
        )


def _capture(runner: Runner, model: "Model | FallbackModel") -> None:
    """Capture steps; of a model in transformers' code decode steps, where that is possible."""
    if isinstance(model, Model):
        runner.capture()
        return
    reason = "the model's code needs values on the host"
    if model.is_capturable:
        try:
            runner.capture()
        except RuntimeError as error:
            torch.cuda.synchronize()
            reason = str(error)
        else:
            return
    _logger.warning("decode steps run eager, launched kernel by kernel: %s", reason)


class _ProgressLog:
    """Logs each quarter of the weights once."""

    def __init__(self) -> None:
        self._num_told = 0

    def __call__(self, fraction: float) -> None:
        quarter = int(fraction * 4)
        if quarter > self._num_told:
            self._num_told = quarter
            _logger.info("loading weights: %d %%", 25 * quarter)


def _device_name(device: torch.device, num_ranks: int) -> str:
    times = f"{num_ranks} x " if num_ranks > 1 else ""
    if device.type == "cuda":
        return times + torch.cuda.get_device_name(device)
    return f"{times}CPU ({torch.get_num_threads()} threads)"


def _decode_program(model: "Model | FallbackModel", device: torch.device) -> DecodeProgram | None:
    """The decode step in few kernels, for cards that its tiles were measured on."""
    if device.type != "cuda" or not isinstance(model, Model):
        return None
    if torch.cuda.get_device_capability(device) < _FIRST_WITH_EARLY_STARTS:
        return None
    # Triton, which a worker without a card may lack.
    from octavo_worker.backends.fused_decode import FusedDecode

    return FusedDecode.of(model, pdl=True)

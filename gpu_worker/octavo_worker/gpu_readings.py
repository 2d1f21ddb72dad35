"""What the worker's card says of itself, asked only when metrics are scraped (NVML).

Without a card, or with a driver that doesn't speak NVML, there is nothing to read. Must not
know: metrics' names, steps. Entry point: `gpu_reader`.
"""

import logging
from collections.abc import Callable, Sequence

import pynvml
import torch

from octavo.metrics import GpuReading

_logger = logging.getLogger(__name__)


def gpu_reader(device: torch.device) -> Callable[[], Sequence[GpuReading]]:
    """Reads `device`; what it gives is empty if that isn't a card that NVML knows."""
    if device.type != "cuda":
        return tuple
    # By UUID: CUDA_VISIBLE_DEVICES numbers cards in its own way, NVML doesn't follow it.
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        name = str(pynvml.nvmlDeviceGetIndex(handle))
    except pynvml.NVMLError as error:
        _logger.warning("no GPU metrics: NVML says: %s", error)
        return tuple
    return lambda: _read(handle, name, lambda: torch.cuda.memory_reserved(device))


def _read(
    handle: object, name: str, process_memory_bytes: Callable[[], int]
) -> Sequence[GpuReading]:
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError:
        # The card fell off the bus; the engine finds out by itself.
        return ()
    try:
        utilization = int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except pynvml.NVMLError:
        # A slice of a card (MIG) doesn't say.
        utilization = None
    used, total = int(memory.used), int(memory.total)
    return (GpuReading(name, utilization, used, total, process_memory_bytes()),)

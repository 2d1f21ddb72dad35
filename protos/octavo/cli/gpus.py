"""Cards that `octavo plan` knows, by the numbers of their makers.

Memory: what the driver reports as the card's total (`nvidia-smi`, ECC on where it is by default);
most of the totals stand together in modal-labs/modal-client's pull request 2797. Bandwidth and
dense bfloat16 arithmetic (no sparsity, which is half of what data sheets print first; float32
sums): NVIDIA's data sheets of each card, of the SXM module where nothing else is said; for GeForce
its whitepapers of Ampere GA102 and of Ada, appendices. Entry point: `find_gpu`.
"""

from dataclasses import dataclass

from octavo.errors import ConfigurationError

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """`read_bytes_per_s` and `flops` are ceilings of the hardware; 0 = not known."""

    name: str
    memory_bytes: int
    read_bytes_per_s: float = 0.0
    flops: float = 0.0


GPUS = (
    # The data sheet says "up to 8 TB/s"; the driver's 7,680 bits at twice 3,996 MHz are 7.67
    # (measured for pytorch/ao's pull request 4002).
    Gpu("B200", 183_359 * _MIB, 7.67e12, 2_250e12),
    Gpu("H200", 143_771 * _MIB, 4.8e12, 989e12),
    Gpu("H100", 81_559 * _MIB, 3.35e12, 989e12),
    Gpu("H100-PCIe", 81_559 * _MIB, 2.0e12, 756e12),
    Gpu("A100-80", 81_920 * _MIB, 2.039e12, 312e12),
    Gpu("A100-40", 40_960 * _MIB, 1.555e12, 312e12),
    Gpu("L40S", 46_068 * _MIB, 864e9, 362e12),
    Gpu("L4", 23_034 * _MIB, 300e9, 121e12),
    Gpu("RTX4090", 24_564 * _MIB, 1_008e9, 165e12),
    Gpu("RTX3090", 24_576 * _MIB, 936e9, 71e12),
)


def find_gpu(name: str) -> Gpu:
    """By its name, however spelled ("rtx 4090", "h100_pcie"). Raises ConfigurationError."""
    wanted = _plain(name)
    for gpu in GPUS:
        if _plain(gpu.name) == wanted:
            return gpu
    known = ", ".join(gpu.name for gpu in GPUS)
    raise ConfigurationError(
        f"--gpu {name!r} isn't known; one of {known}, or give --gpu-memory", param="gpu"
    )


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())

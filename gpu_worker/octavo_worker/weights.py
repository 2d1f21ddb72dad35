"""Weights: a checkpoint's safetensors, checked as a whole, then copied each to its place.

All headers are read and all names, shapes and dtypes compared with the model before the first
byte is loaded: an incomplete checkpoint fails within seconds, by the name of the tensor and
file, and never as wrong text. Files are memory-mapped; a tensor goes straight from the mapping
to its rows of the (fused) parameter on the device, cast on the way. Must not know: layers,
backends, services. Entry points: `Checkpoint`, `load_weights`, `fill_random`.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.errors import ConfigurationError
from octavo_worker.load_threads import in_threads
from octavo_worker.models.folder import read_json
from octavo_worker.quant.block_scales import BlockScales
from octavo_worker.slots import FLOATS, BadValuesError, Place, Slot

_LOG = logging.getLogger(__name__)

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_E4M3 = "F8_E4M3"
_LFS_START = b"version https://git-lfs"
# Computed from the configuration; old checkpoints hold them all the same.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq")

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, by the name that it has there; `dtype` as safetensors spells it;
    `scales`: those of its blocks, by which it is widened (None = it isn't)."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    handle: Any
    scales: "tuple[BlockScales, StoredTensor] | None" = None

    @property
    def read_as(self) -> torch.dtype | None:
        """The dtype that `read` gives; None = one that is unknown here."""
        return torch.float32 if self.scales is not None else _DTYPES.get(self.dtype)

    def read(self) -> Tensor:
        """Its values on the CPU, a view of the mapped file unless they are widened.

        Raises BadValuesError for scales that can't be right.
        """
        stored = self.handle.get_tensor(self.name)
        if self.scales is None:
            return stored
        block_scales, scales = self.scales
        return block_scales.widened(stored, scales.read())

    @property
    def num_bytes(self) -> int:
        size = torch.Size(self.shape).numel()
        return size * (_DTYPES[self.dtype].itemsize if self.dtype in _DTYPES else 1)


class Checkpoint:
    """The tensors of a folder by name: one file, or the shards that the index names.

    Other safetensors files in the folder are nobody's business. Use as a context manager.
    """

    def __init__(self, folder: Path, *, base_name: str | None = None) -> None:
        """Open and check all files. Raises ConfigurationError naming the file or tensor.

        `base_name`: of the one file, without .safetensors, where it isn't called as usual.
        """
        self.folder = folder
        self._base_name = base_name
        self._stack = ExitStack()
        try:
            self.tensors = self._open()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self.tensors = {}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str) -> Tensor:
        """See `StoredTensor.read`."""
        return self.tensors[name].read()

    def rename(self, own_name: Callable[[str], str | None]) -> None:
        """From now on tensors have other names; those without one aren't there."""
        named = {own_name(name): tensor for name, tensor in self.tensors.items()}
        self.tensors = {name: tensor for name, tensor in named.items() if name is not None}

    def widen(self, block_scales: BlockScales) -> None:
        """From now on layers with such scales read as float32, and the scales are no tensors.

        Raises ConfigurationError naming scales that don't fit a layer.
        """
        ending = f".{block_scales.suffix}"
        for name in [name for name in self.tensors if name.endswith(ending)]:
            scales = self.tensors.pop(name)
            weight_name = f"{name.removesuffix(ending)}.weight"
            weight = self.tensors.get(weight_name)
            if weight is None or weight.dtype != _E4M3 or len(weight.shape) != 2:
                raise ConfigurationError(
                    f"{scales.path}: tensor {scales.name} scales {weight_name}, which "
                    f"{'no file holds' if weight is None else f'is no matrix in {_E4M3}'}"
                )
            wanted = block_scales.shape(weight.shape)
            if scales.shape != wanted or not is_float(scales.dtype):
                raise ConfigurationError(
                    f"{scales.path}: tensor {scales.name} is {scales.dtype} {list(scales.shape)}, "
                    f"{block_scales} need floats {list(wanted)}"
                )
            self.tensors[weight_name] = replace(weight, scales=(block_scales, scales))

    def dtype(self) -> torch.dtype | None:
        """The dtype of the first floating tensor, for folders whose config.json has none."""
        stored = (_DTYPES.get(tensor.dtype) for tensor in self.tensors.values())
        return next((dtype for dtype in stored if dtype in FLOATS), None)

    def _open(self) -> dict[str, StoredTensor]:
        single, index = self.folder / SINGLE_NAME, self.folder / INDEX_NAME
        if single.exists():
            return self._open_file(single)
        if index.exists():
            return self._open_shards(index)
        if self._base_name is not None:
            return self._open_file(self._other_single())
        found = sorted(path.name for path in self.folder.glob("*.safetensors"))
        raise ConfigurationError(
            f"{self.folder}: neither {SINGLE_NAME} nor {INDEX_NAME} is there"
            + (f" (but {', '.join(found[:4])})" if found else "")
            + "; other formats than safetensors must be converted first"
        )

    def _other_single(self) -> Path:
        name = f"{self._base_name}.safetensors"
        path = self.folder / name
        if Path(name).name != name or not path.exists():
            raise ConfigurationError(
                f"{self.folder}: neither {SINGLE_NAME} nor {INDEX_NAME} nor {name!r}, which "
                "quantize_config.json names, is there"
            )
        return path

    def _open_shards(self, index: Path) -> dict[str, StoredTensor]:
        weight_map = _weight_map(index)
        tensors: dict[str, StoredTensor] = {}
        for file_name in sorted(set(weight_map.values())):
            expected = {name for name, file in weight_map.items() if file == file_name}
            path = self.folder / file_name
            if not path.exists():
                raise ConfigurationError(
                    f"{path}: the shard is absent; {index.name} says that it holds {some(expected)}"
                )
            stored = self._open_file(path)
            if absent := expected - stored.keys():
                raise ConfigurationError(
                    f"{path}: holds no {some(absent)}, though {index.name} says so"
                )
            if extra := stored.keys() - expected:
                raise ConfigurationError(
                    f"{path}: holds {some(extra)}, which {index.name} doesn't place there"
                )
            tensors |= stored
        return tensors

    def _open_file(self, path: Path) -> dict[str, StoredTensor]:
        handle = self._stack.enter_context(_open_safetensors(path))
        tensors: dict[str, StoredTensor] = {}
        for name in handle.keys():  # noqa: SIM118 - no mapping
            part = handle.get_slice(name)
            shape = tuple(part.get_shape())
            tensors[name] = StoredTensor(name, path, part.get_dtype(), shape, handle)
        return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name. Files are plain names: an index can't reach out of its folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigurationError(f"{index}: has no weight_map")
    for name, file_name in weight_map.items():
        is_plain = isinstance(file_name, str) and Path(file_name).name == file_name
        if not is_plain or file_name in ("", ".."):
            raise ConfigurationError(f"{index}: {name} is in {file_name!r}, which is no file name")
    return weight_map


def _open_safetensors(path: Path) -> Any:
    """Map a file; the library compares the header with the file's size."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS_START))
        if start == _LFS_START:
            raise ConfigurationError(
                f"{path}: is a Git-LFS pointer, not the weights; fetch them with `git lfs pull`"
            )
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        size = path.stat().st_size
        raise ConfigurationError(
            f"{path}: is damaged, cut short or no safetensors file ({size:,} bytes): {error}"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"{path}: can't be read: {error}") from None


def is_float(dtype: str) -> bool:
    """Whether safetensors' name of a dtype is one of the floats that models compute in."""
    return _DTYPES.get(dtype) in FLOATS


def some(names: Collection[str]) -> str:
    """At most three of the names, in order."""
    first = ", ".join(sorted(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more tensors"


class HeadChoice(NamedTuple):
    """Whether the head is the embedding matrix, and the name under which that is stored."""

    tied: bool
    embed_name: str


def choose_head(
    checkpoint: Checkpoint, *, tie: bool, embed_name: str, head_name: str
) -> HeadChoice:
    """What the configuration's tie flag means for this file, as transformers decides it.

    Tied with only one of both stored: that one is both. Tied with both stored: tied if they are
    equal, else the file wins, with a warning. Not tied: both are needed.
    """
    if not tie:
        return HeadChoice(tied=False, embed_name=embed_name)
    if head_name not in checkpoint:
        return HeadChoice(tied=True, embed_name=embed_name)
    if embed_name not in checkpoint:
        return HeadChoice(tied=True, embed_name=head_name)
    embed, head = checkpoint.read(embed_name), checkpoint.read(head_name)
    if embed.shape == head.shape and torch.equal(embed, head.to(embed.dtype)):
        return HeadChoice(tied=True, embed_name=embed_name)
    _LOG.warning(
        "config.json ties the head to the embedding, but %s holds a different %s: not tied",
        checkpoint.tensors[head_name].path,
        head_name,
    )
    return HeadChoice(tied=False, embed_name=embed_name)


def load_weights(
    checkpoint: Checkpoint,
    slots: Mapping[str, Place],
    *,
    ignored: Collection[str] = (),
    progress: Progress | None = None,
    num_threads: int = 1,
) -> None:
    """Fill every slot from the tensor of its name, exactly once.

    `ignored` may be in the checkpoint without a slot. `progress` gets the loaded fraction, in the
    caller's thread. Raises ConfigurationError naming tensor and file, but for broken values before
    anything is loaded.
    """
    _check(checkpoint, slots, ignored)
    began = time.monotonic()
    by_file = sorted(slots, key=lambda name: str(checkpoint.tensors[name].path))
    sizes = {name: checkpoint.tensors[name].num_bytes for name in by_file}
    total, done = sum(sizes.values()), 0

    def load(name: str) -> str:
        try:
            slots[name].load(checkpoint.read(name))
        except BadValuesError as error:
            tensor = checkpoint.tensors[name]
            raise ConfigurationError(f"{tensor.path}: tensor {tensor.name} {error}") from None
        return name

    for name in in_threads(load, by_file, num_threads):
        done += sizes[name]
        if progress is not None:
            progress(done / total)
    seconds = time.monotonic() - began
    _LOG.info(
        "weights: %.2f GB of %d tensors in %.1f s, %.1f GB/s (threads: %d)",
        total / 1e9,
        len(sizes),
        seconds,
        total / 1e9 / max(seconds, 1e-9),
        num_threads,
    )


def _check(checkpoint: Checkpoint, slots: Mapping[str, Place], ignored: Collection[str]) -> None:
    tensors = checkpoint.tensors
    if missing := slots.keys() - tensors.keys():
        files = sorted({tensor.path.name for tensor in tensors.values()})
        raise ConfigurationError(
            f"{checkpoint.folder}: the model needs {some(missing)}, which no file holds "
            f"({', '.join(files[:3])}{', ...' if len(files) > 3 else ''})"
        )
    for name, tensor in tensors.items():
        if name.endswith(_IGNORED_SUFFIXES) or (name in ignored and name not in slots):
            continue
        if name not in slots:
            raise ConfigurationError(
                f"{tensor.path}: the model has no place for the tensor {tensor.name} "
                f"{list(tensor.shape)}; is config.json of another model?"
            )
        slot = slots[name]
        if tensor.shape != slot.shape:
            raise ConfigurationError(
                f"{tensor.path}: tensor {tensor.name} has the shape {list(tensor.shape)}, "
                f"config.json asks for {list(slot.shape)}"
            )
        if tensor.read_as not in slot.dtypes:
            allowed = ", ".join(name for dtype, name in _NAMES.items() if dtype in slot.dtypes)
            raise ConfigurationError(
                f"{tensor.path}: tensor {tensor.name} has the dtype {tensor.dtype}; one of "
                f"{allowed} is needed; is it quantized, and config.json says nothing of it?"
            )


def fill_random(slots: Mapping[str, Slot], *, seed: int, std: float) -> None:
    """Draw all slots' values on their device: norms 1, all else normal with `std`, or as the slot
    says.

    The same seed gives the same values on the same kind of device.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for slot in slots.values():
        device = slot.target.device
        generator = generators.get(device)
        if generator is None:
            generator = torch.Generator(device=device).manual_seed(seed)
            generators[device] = generator
        slot.draw(generator, std)

"""Loading side by side: everything once, errors at once, the same weights as in one thread."""

import logging
import shutil
import threading
from pathlib import Path

import pytest
import torch

from octavo.errors import ConfigurationError
from octavo_worker.load_threads import in_threads
from octavo_worker.models import load_model
from octavo_worker.slots import BadValuesError, Slot, in_pieces
from octavo_worker.weights import Checkpoint, load_weights
from tests.tiny_models import save_tiny_model
from tests.unit.gpu_worker.checkpoint_files import Q_NAME


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("sharded"), max_shard_size="200KB")


def empty_slots(folder: Path) -> dict[str, Slot]:
    slots = load_model(folder, load_format="random").slots()
    return {name: Slot(torch.full_like(slot.target, torch.nan)) for name, slot in slots.items()}


@pytest.mark.parametrize("num_threads", [1, 2, 8])
def test_threads_load_what_one_loads(
    num_threads: int, sharded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = load_model(sharded).slots()
    slots = empty_slots(sharded)
    fractions: list[float] = []
    with Checkpoint(sharded) as checkpoint, caplog.at_level(logging.INFO):
        load_weights(checkpoint, slots, progress=fractions.append, num_threads=num_threads)
    for name, slot in slots.items():
        assert torch.equal(slot.target, expected[name].target), name
    assert fractions == sorted(fractions)
    assert len(fractions) == len(slots)
    assert fractions[-1] == 1.0
    assert f"of {len(slots)} tensors in" in caplog.text
    assert f"GB/s (threads: {num_threads})" in caplog.text


@pytest.mark.parametrize("num_threads", [1, 4])
def test_broken_values_name_file_and_tensor(num_threads: int, sharded: Path) -> None:
    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise BadValuesError("is broken")

    slots = empty_slots(sharded)
    slots[Q_NAME] = Slot(slots[Q_NAME].target, take=refuse)
    with (
        Checkpoint(sharded) as checkpoint,
        pytest.raises(ConfigurationError, match=rf"model-.*\.safetensors.*{Q_NAME} is broken"),
    ):
        load_weights(checkpoint, slots, num_threads=num_threads)


def test_a_shard_cut_short_is_refused_before_threads_start(sharded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    shard = next(folder.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ConfigurationError, match="cut short"):
        Checkpoint(folder)


@pytest.mark.parametrize("num_bytes", [1, 40, 79, 80, 81, 10_000])
@pytest.mark.parametrize("shape", [(7, 20), (1, 20), (30,), (0, 4), ()])
def test_pieces_make_up_the_whole(shape: tuple[int, ...], num_bytes: int) -> None:
    target, values = torch.full(shape, torch.nan), torch.randn(shape)
    sizes: list[int] = []
    for place, piece in in_pieces(target, values, num_bytes):
        place.copy_(piece)
        sizes.append(place.nbytes)
    assert torch.equal(target, values)
    row_bytes = target[0].nbytes if target.ndim and len(target) else 4
    assert all(size <= max(num_bytes, row_bytes) for size in sizes)


def test_one_thread_is_the_callers_and_keeps_the_order() -> None:
    callers: set[int] = set()

    def note(item: int) -> int:
        callers.add(threading.get_ident())
        return item

    assert list(in_threads(note, range(5), 1)) == [0, 1, 2, 3, 4]
    assert callers == {threading.get_ident()}


def test_items_run_side_by_side() -> None:
    """Each waits for the other: one after the other would never end."""
    meet = threading.Barrier(2, timeout=60)
    assert sorted(in_threads(lambda item: (meet.wait(), item)[1], [1, 2], 2)) == [1, 2]


def test_an_error_ends_all_threads() -> None:
    def run(item: int) -> int:
        if item == 3:
            raise ConfigurationError("three")
        return item

    with pytest.raises(ConfigurationError, match="three"):
        list(in_threads(run, range(100), 4))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("load")]

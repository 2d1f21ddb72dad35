"""What a card says of itself, and silence without one."""

from collections.abc import Callable
from types import SimpleNamespace

import pynvml
import pytest
import torch

from octavo.metrics import GpuReading
from octavo_worker.gpu_readings import gpu_reader


def test_a_cpu_has_nothing_to_say() -> None:
    assert list(gpu_reader(torch.device("cpu"))()) == []


@pytest.mark.gpu
def test_a_card_says_what_is_true() -> None:
    device = torch.device("cuda")
    read = gpu_reader(device)
    # What earlier tests of this process left free would serve the block.
    torch.cuda.empty_cache()
    before = read()[0]
    # More than the allocator still holds, as parts of that may be free too.
    num_bytes = before.process_memory_bytes + (1 << 28)
    block = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    after = read()[0]
    assert after.process_memory_bytes - before.process_memory_bytes == block.numel()
    # No more is certain of the whole card: others come and go on it.
    assert after.memory_used_bytes >= after.process_memory_bytes
    total = torch.cuda.get_device_properties(device).total_memory
    # NVML counts what the driver keeps for itself too.
    assert total <= after.memory_total_bytes < 1.1 * total
    assert after.utilization is not None
    assert 0 <= after.utilization <= 1
    index = pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByIndex(int(after.device)))
    assert str(index) == after.device


class FakeNvml:
    """A driver in place of NVIDIA's: `fails` names the calls that it can't answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails: dict[str, int] = {}
        answers = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByUUID": "card",
            "nvmlDeviceGetIndex": 3,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5 << 30, total=8 << 30),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=40, memory=10),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, self._call(name, answer))
        properties = SimpleNamespace(uuid="0f1e")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 4 << 30)

    def _call(self, name: str, answer: object) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            if name in self.fails:
                raise pynvml.NVMLError(self.fails[name])
            if name == "nvmlDeviceGetHandleByUUID":
                assert arguments == ("GPU-0f1e",)
            return answer

        return call


def test_a_drivers_answers_are_in_our_units(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(monkeypatch)
    assert gpu_reader(torch.device("cuda"))() == (GpuReading("3", 0.4, 5 << 30, 8 << 30, 4 << 30),)


def test_what_a_driver_does_not_say_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(monkeypatch)
    read = gpu_reader(torch.device("cuda"))
    nvml.fails["nvmlDeviceGetUtilizationRates"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert [gpu.utilization for gpu in read()] == [None]
    # The card fell off the bus.
    nvml.fails["nvmlDeviceGetMemoryInfo"] = pynvml.NVML_ERROR_GPU_IS_LOST
    assert list(read()) == []
    nvml.fails.clear()
    assert [gpu.utilization for gpu in read()] == [0.4]


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_no_driver_no_readings(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FakeNvml(monkeypatch).fails[call] = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    assert list(gpu_reader(torch.device("cuda"))()) == []
    assert "no GPU metrics" in caplog.text

"""What a card says of itself, and silence without one."""

import pynvml
import pytest
import torch

from octavo_worker.gpu_readings import gpu_reader


def test_a_cpu_has_nothing_to_say() -> None:
    assert list(gpu_reader(torch.device("cpu"))()) == []


@pytest.mark.gpu
def test_a_card_says_what_is_true() -> None:
    device = torch.device("cuda")
    read = gpu_reader(device)
    before = read()[0]
    block = torch.ones(1 << 28, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    after = read()[0]
    assert after.process_memory_bytes - before.process_memory_bytes == block.numel()
    assert after.memory_used_bytes - before.memory_used_bytes >= block.numel()
    total = torch.cuda.get_device_properties(device).total_memory
    # NVML counts what the driver keeps for itself too.
    assert total <= after.memory_total_bytes < 1.1 * total
    assert after.utilization is not None
    assert 0 <= after.utilization <= 1
    index = pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByIndex(int(after.device)))
    assert str(index) == after.device

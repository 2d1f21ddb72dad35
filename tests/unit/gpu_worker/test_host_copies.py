"""No result is overwritten before it was read; uploads keep what the host had when they began."""

import numpy as np
import pytest
import torch

from octavo_worker.host_copies import ResultRing, upload, upload_into


def test_a_slot_waits_for_its_reader() -> None:
    ring = ResultRing(2, 8, is_pinned=False)
    results = [ring.copy(torch.full((2, 3), value)) for value in range(2)]
    assert [result.unique().tolist() for result in results] == [[0], [1]]
    with pytest.raises(AssertionError, match="overwritten"):
        ring.copy(torch.zeros(2, 3))
    ring.read()
    ring.copy(torch.zeros(2, 3))
    with pytest.raises(AssertionError, match="overwritten"):
        ring.copy(torch.zeros(2, 3))


def test_nothing_is_read_that_was_not_launched() -> None:
    with pytest.raises(AssertionError):
        ResultRing(2, 8, is_pinned=False).read()


@pytest.mark.gpu
def test_copies_of_a_busy_card() -> None:
    """The host goes on at once: it reuses its arrays, and reads in the order of launches."""
    device = torch.device("cuda")
    ring = ResultRing(4, 2 * 1000, is_pinned=True)
    target = torch.zeros(100_000, dtype=torch.int64, device=device)
    pending: list[tuple[int, torch.Tensor, torch.cuda.Event]] = []

    def read() -> None:
        value, result, done = pending.pop(0)
        done.synchronize()
        assert result.unique().tolist() == [value]
        ring.read()

    array = np.zeros(100_000, np.int64)
    for value in range(200):
        torch.cuda._sleep(1_000_000)
        array[:] = value
        upload_into(array, target)
        other = upload(array, device)
        array[:] = -1
        drawn = (target[:2000] + other[:2000]).view(2, 1000) // 2
        result = ring.copy(drawn)
        done = torch.cuda.Event()
        done.record()
        pending.append((value, result, done))
        if len(pending) == 4:
            read()
    while pending:
        read()

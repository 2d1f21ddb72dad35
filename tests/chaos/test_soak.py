"""Three minutes of the soak: see soak.py."""

from pathlib import Path

import pytest

from tests.chaos.soak import MAX_GROWTH, soak, soak_fleet


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_no_process_grows(tiny_folder: Path, tmp_path: Path) -> None:
    with soak_fleet(tmp_path, tiny_folder) as fleet:
        growths, num_answers = soak(fleet, 180)
    assert num_answers
    assert max(growth.share for growth in growths) <= MAX_GROWTH, growths

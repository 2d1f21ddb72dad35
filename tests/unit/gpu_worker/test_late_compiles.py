"""What compiles in service is counted and named. Triton's part is played by this file."""

import logging

import pytest
from prometheus_client import CollectorRegistry
from triton import knobs

from octavo.metrics import WorkerMetrics
from octavo_worker.late_compiles import LateCompiles


def test_a_late_kernel_is_counted_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Put back at the end: Triton has one listener.
    for name in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(knobs.runtime, name, None)
    registry = CollectorRegistry()
    LateCompiles(WorkerMetrics(registry)).watch()
    begin, end = knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook
    assert begin is not None
    assert end is not None
    told = {
        "key": "k",
        "repr": "paged_decode[num_warps=4](x: *bf16)",
        "fn": None,
        "compile": {},
        "is_manual_warmup": False,
        "already_compiled": False,
    }
    # Whoever says yes here keeps Triton from compiling.
    assert not begin(**told)
    with caplog.at_level(logging.WARNING):
        assert not end(**told)
    assert registry.get_sample_value("octavo_late_compile_seconds_count") == 1
    assert "paged_decode[num_warps=4](x: *bf16)" in caplog.text

"""Stacks that several end-to-end modules share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.edge import start_edge_stack
from tests.e2e.stack import Stack
from tests.fakes.otlp_receiver import OtlpReceiver


@pytest.fixture(scope="session")
def demo_stack(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The demo model behind all three services; tests leave it idle."""
    flags = ("--check-integrity", "true")
    folder = tmp_path_factory.mktemp("demo-stack")
    with Stack(folder, model=demo_folder, scheduler_flags=flags) as stack:
        yield stack


@pytest.fixture(scope="session")
def edge_stack(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The tiny model behind a router with a key and small limits."""
    with start_edge_stack(tmp_path_factory.mktemp("edge"), tiny_folder) as stack:
        yield stack


@pytest.fixture(scope="session")
def metered_traces() -> Iterator[OtlpReceiver]:
    """Where `metered_stack` sends its spans."""
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def metered_stack(
    tiny_folder: Path, metered_traces: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """The tiny model on two workers of 24 KV blocks, 384 tokens, each; tests may kill one."""
    with Stack(
        tmp_path_factory.mktemp("metered-stack"),
        model=tiny_folder,
        num_workers=2,
        worker_flags=("--num-kv-blocks", "25", "--max-num-seqs", "8"),
        scheduler_flags=("--check-integrity", "true", "--max-queue-tokens", "300"),
        environ=metered_traces.environ,
    ) as stack:
        yield stack

"""What a cell tells the registry, and its gauges: the truth, and again only when it changed."""

import asyncio
from dataclasses import dataclass, replace

import pytest

from octavo.blocks import HASH_BYTES
from octavo.bloom import BloomFilter
from octavo.registry import MemoryRegistry, UsageRecord
from octavo_scheduler import ledger as ledger_module
from octavo_scheduler.gauges import WorkerGauges
from octavo_scheduler.ledger import Ledger
from octavo_scheduler.members import Member
from tests.fakes.fake_device import FakeDevice
from tests.fakes.simulated_cell import SimulatedCell, prompt_of


@dataclass
class Link:
    """What a ledger sees of a worker's link."""

    worker_id: str
    member: Member | None
    boot_id: str = "boot"
    address: str = "w:1"
    epoch: int = 1


class Registry(MemoryRegistry):
    """Remembers everything that it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[UsageRecord] = []
        self.filters_told: list[bytes] = []

    def publish_usage(self, record: UsageRecord) -> None:
        self.told.append(record)
        super().publish_usage(record)

    def publish_filter(self, scheduler_id: str, data: bytes) -> None:
        self.filters_told.append(data)
        super().publish_filter(scheduler_id, data)


class Setup:
    def __init__(self, num_workers: int = 1) -> None:
        self.cell = SimulatedCell(num_workers=num_workers)
        self.registry = Registry()
        self.links = [Link(m.state.worker_id, m) for m in self.cell.members]
        self.ledger = Ledger(self.registry, self.cell.cell, "s", "s:1")

    def publish(self, times: int = 1) -> list[UsageRecord]:
        """Publish; the usages told by it."""
        before = len(self.registry.told)
        for _ in range(times):
            asyncio.run(self.ledger.publish(self.links))  # type: ignore[arg-type]
        return self.registry.told[before:]


def test_the_sequence_rises_with_changes_only() -> None:
    setup = Setup()
    idle = setup.publish(3)
    assert [usage.sequence for usage in idle] == [1, 1, 1]
    assert idle[0] == idle[1] == idle[2]
    setup.cell.submit(prompt_of(40), 100)
    for _ in range(5):
        setup.cell.step()
    busy = setup.publish(2)
    assert [usage.sequence for usage in busy] == [2, 2]
    assert busy[0].num_rows == 1
    # 40 tokens of prompt and some more.
    assert busy[0].num_used == int.from_bytes(busy[0].used_bitmap, "little").bit_count() >= 3
    setup.cell.run()
    over = setup.publish()[0]
    assert (over.sequence, over.num_rows, over.num_used, over.backlog_tokens) == (3, 0, 0, 0)
    assert over.num_cached == 8  # 139 computed tokens: the last drawn one is never computed


def test_each_worker_has_a_sequence_of_its_own_and_leaves_with_its_link() -> None:
    setup = Setup(num_workers=2)
    setup.publish()
    setup.cell.submit(prompt_of(40), 100)
    setup.cell.step()
    told = {usage.worker_id: usage.sequence for usage in setup.publish()}
    assert sorted(told.values()) == [1, 2]
    setup.links[0].member = None
    assert [usage.worker_id for usage in setup.publish()] == ["w1"]
    assert [usage.worker_id for usage in setup.registry.usages()] == ["w1"]


def test_the_filter_holds_every_block_of_every_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_SLICE_BLOCKS", 7)
    setup = Setup(num_workers=2)
    inventory = {block: bytes([w]) * HASH_BYTES for block, w in ((1, 1), (6, 2), (7, 3), (1023, 4))}
    for member in setup.cell.members:
        member.state.restore(list(inventory), list(inventory.values()))
    setup.publish(4)
    # The second time nothing had changed.
    assert len(setup.registry.filters_told) == 1
    found = BloomFilter.from_bytes(setup.registry.filters_told[0])
    assert found.num_items == 2 * len(inventory)
    assert all(found.holds(block_hash) for block_hash in inventory.values())
    setup.cell.submit(prompt_of(40), 1)
    setup.cell.run()
    setup.publish(3)
    assert len(setup.registry.filters_told) == 2


def test_gauges_of_workers_come_and_go_with_them() -> None:
    cell = SimulatedCell(num_workers=2)
    gauges = WorkerGauges(cell.metrics, cell.cell)
    gauges.tell()
    assert cell.counter("kv_blocks", worker="w0", state="free") == 1023
    assert cell.counter("kv_utilization_ratio", worker="w0") == 1
    cell.submit(prompt_of(40), 100)
    for _ in range(3):
        cell.step()
    gauges.tell()
    used = [cell.counter("kv_blocks", worker=w, state="used") for w in ("w0", "w1")]
    assert sorted(used)[0] == 0
    ratios = [cell.counter("kv_utilization_ratio", worker=w) for w in ("w0", "w1")]
    assert 40 / (16 * sum(used)) < min(ratios) < 1
    cell.kill(cell.members[0])
    gauges.tell()
    value = cell.metrics.registry.get_sample_value
    labels = {"worker": "w0", "state": "used"}
    assert value("octavo_kv_blocks", labels) is None
    assert value("octavo_kv_blocks", {**labels, "worker": "w1"}) is not None
    assert value("octavo_kv_utilization_ratio", {"worker": "w0"}) is None


def test_a_worker_that_comes_back_begins_a_new_sequence() -> None:
    setup = Setup()
    setup.publish()
    device = setup.cell.kill(setup.cell.members[0])
    setup.links[0].member = None
    setup.publish()
    back = setup.cell.attach(FakeDevice(device.size))
    setup.links = [replace(setup.links[0], member=back, epoch=2)]
    told = setup.publish()
    assert [(usage.epoch, usage.sequence) for usage in told] == [(2, 1)]

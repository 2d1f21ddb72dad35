"""What live views see of a cell, and what it costs: nothing while nobody looks."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from octavo.cancel_reason import CancelReason
from octavo.settings import SchedulerSettings
from octavo_scheduler import block_map
from octavo_scheduler.block_map import MAX_BLOCKS, MAX_CELLS, draw_map
from octavo_scheduler.block_pool import BlockPool, BlockState
from octavo_scheduler.chronicle import Chronicle
from octavo_scheduler.live_view import LiveView
from octavo_scheduler.picture import Seat
from octavo_scheduler.recovery import Loss
from tests.fakes.fake_device import FakeSize
from tests.fakes.simulated_cell import SESSION, SimulatedCell, prompt_of


class Watched:
    """A simulated cell somebody may watch."""

    def __init__(self, sim: SimulatedCell) -> None:
        self.sim = sim
        self.view = LiveView(sim.cell, "cell-1", self._seats)
        # (worker id, address) of workers that the scheduler wants to lead but doesn't.
        self.absent: list[tuple[str, str]] = []

    def _seats(self) -> list[Seat]:
        led = [
            Seat(member.state.worker_id, f"host:{i}", i + 1, member)
            for i, member in enumerate(self.sim.cell.members)
        ]
        return [*led, *(Seat(worker_id, address, 0, None) for worker_id, address in self.absent)]

    def picture(self) -> dict[str, Any]:
        """A fresh one."""
        self.sim.clock.advance(1.0)
        return json.loads(asyncio.run(self.view.picture_json()))


def worker_of(picture: dict[str, Any], worker_id: str) -> dict[str, Any]:
    return next(w for w in picture["workers"] if w["worker_id"] == worker_id)


def request_of(picture: dict[str, Any], handle: int) -> dict[str, Any]:
    return next(r for r in picture["requests"] if r["request_id"] == f"r{handle}")


def test_a_picture_tells_workers_queue_and_requests() -> None:
    watched = Watched(SimulatedCell(FakeSize(max_num_seqs=4)))
    sim = watched.sim
    with watched.view.watching():
        handles = [sim.submit(prompt_of(40, seed=i), 50) for i in range(6)]
        for _ in range(10):
            sim.step()
        picture = watched.picture()
        assert picture["scheduler_id"] == "cell-1"
        assert (picture["num_running"], picture["num_waiting"]) == (4, 2)
        assert picture["queue_tokens"] == 80
        assert picture["oldest_wait_s"] > 1.0
        worker = worker_of(picture, "w0")
        assert (worker["phase"], worker["address"], worker["epoch"]) == ("running", "host:0", 1)
        assert (worker["num_rows"], worker["max_num_seqs"]) == (4, 4)
        assert worker["step"] == sim.members[0].state.last_step > 0
        assert worker["num_known_tokens"] > 4 * 40
        blocks = [worker[f"num_{state}_blocks"] for state in ("used", "cached", "free")]
        assert sum(blocks) == worker["num_blocks"] == 1023
        assert blocks[0] >= 4 * 3
        running = request_of(picture, handles[0])
        assert (running["phase"], running["worker_id"]) == ("decode", "w0")
        assert (running["num_prompt_tokens"], running["why"]) == (40, "only worker")
        assert running["num_generated_tokens"] > 0
        assert running["ttft_ms"] > 0
        sim.run()
        picture = watched.picture()
        ended = request_of(picture, handles[5])
        assert (ended["phase"], ended["outcome"], ended["num_generated_tokens"]) == (
            *("ended", "length"),
            50,
        )
        assert ended["queue_ms"] > 0
        assert picture["outcomes"] == {"length": 6}
        assert (picture["num_running"], picture["num_waiting"]) == (0, 0)
        assert picture["oldest_wait_s"] == 0


def test_rates_are_means_of_the_last_moments() -> None:
    watched = Watched(SimulatedCell())
    sim = watched.sim
    with watched.view.watching():
        assert worker_of(watched.picture(), "w0")["decode_tokens_per_s"] == 0
        sim.submit(prompt_of(100), 30)
        sim.run()
        worker = worker_of(watched.picture(), "w0")
        assert worker["prefill_tokens_per_s"] > 0
        # The first picture came after 1 s, the second about one later.
        assert 10 <= worker["decode_tokens_per_s"] <= 15
        for _ in range(3):
            worker = worker_of(watched.picture(), "w0")
        assert (worker["steps_per_s"], worker["decode_tokens_per_s"]) == (0, 0)


def test_where_a_request_went_and_why() -> None:
    watched = Watched(SimulatedCell(num_workers=2))
    sim = watched.sim
    with watched.view.watching():
        prompt = prompt_of(160)
        cold = sim.submit(prompt, 4)
        sim.run()
        warm = sim.submit(prompt, 4)
        sim.run()
        picture = watched.picture()
        first, second = request_of(picture, cold), request_of(picture, warm)
        assert (first["why"], first["num_cached_tokens"]) == ("least load", 0)
        assert (second["why"], second["num_cached_tokens"]) == ("cached prefix", 144)
        assert first["worker_id"] == second["worker_id"]
        assert [r["request_id"] for r in picture["requests"]] == [f"r{warm}", f"r{cold}"]
        assert (picture["prefix_queries"], picture["prefix_hits"]) == (320, 144)


def test_a_lost_worker_is_shown_as_gone_until_it_is_back_or_forgotten() -> None:
    watched = Watched(SimulatedCell(num_workers=2))
    sim = watched.sim
    with watched.view.watching():
        handle = sim.submit(prompt_of(40), 60)
        for _ in range(6):
            sim.step()
        holder = next(m for m in sim.members if m.state.rows.num_held)
        lost, other = holder.state.worker_id, "w0" if holder.state.worker_id == "w1" else "w1"
        device = sim.kill(holder)
        picture = watched.picture()
        gone = worker_of(picture, lost)
        assert (gone["phase"], gone["loss"]) == ("gone", "crash")
        assert gone["gone_s"] == pytest.approx(1.0)
        assert picture["num_moves"] == 1
        waiting = request_of(picture, handle)
        assert (waiting["phase"], waiting["worker_id"], waiting["why"]) == ("waiting", "", None)
        sim.run()
        moved = request_of(watched.picture(), handle)
        assert (moved["worker_id"], moved["num_moves"], moved["outcome"]) == (other, 1, "length")
        # The scheduler goes on dialling one, and never met another.
        watched.absent = [(lost, "host:7"), ("", "host:8")]
        picture = watched.picture()
        assert worker_of(picture, lost)["address"] == "host:7"
        assert worker_of(picture, "") == {
            **{"worker_id": "", "phase": "awaited", "address": "host:8"}
        }
        watched.absent = []
        back = sim.attach(device)
        back.state.worker_id = lost
        assert [w["phase"] for w in watched.picture()["workers"]] == ["running", "running"]
        device = sim.kill(back, Loss.TAKEN)
        assert worker_of(watched.picture(), lost)["phase"] == "taken"
        back = sim.attach(device)
        back.state.worker_id = lost
        sim.kill(back, Loss.LEFT)
        gone = worker_of(watched.picture(), lost)
        assert (gone["phase"], gone["loss"]) == ("gone", "left")
        sim.clock.advance(200.0)
        assert [w["worker_id"] for w in watched.picture()["workers"]] == [other]


def test_requests_that_end_in_the_queue_are_told_too() -> None:
    watched = Watched(SimulatedCell(FakeSize(max_num_seqs=1)))
    sim = watched.sim
    with watched.view.watching():
        sim.submit(prompt_of(20), 40)
        waiting = sim.submit(prompt_of(20, seed=1), 40)
        sim.step()
        sim.cell.cancel(SESSION, waiting, None, CancelReason.CLIENT)
        ended = request_of(watched.picture(), waiting)
        assert (ended["outcome"], ended["worker_id"], ended["why"]) == ("cancelled", "", None)
        assert ended["queue_ms"] is None


def test_only_the_last_requests_are_kept() -> None:
    watched = Watched(SimulatedCell())
    sim = watched.sim
    with watched.view.watching():
        handles = []
        for i in range(120):
            handles.append(sim.submit(prompt_of(5, seed=i), 2))
            sim.run()
        shown = [r["request_id"] for r in watched.picture()["requests"]]
        assert shown == [f"r{handle}" for handle in reversed(handles[-50:])]


def test_who_comes_later_sees_what_runs_already() -> None:
    watched = Watched(SimulatedCell())
    sim = watched.sim
    handle = sim.submit(prompt_of(20), 400)
    for _ in range(5):
        sim.step()
    with watched.view.watching():
        assert request_of(watched.picture(), handle)["phase"] == "decode"


def test_neither_texts_nor_ids_nor_tenants_are_in_a_picture() -> None:
    watched = Watched(SimulatedCell())
    sim = watched.sim
    with watched.view.watching():
        prompt = [23_456] * 40
        sim.submit(prompt, 5)
        sim.run()
        text = json.dumps(watched.picture())
        assert "23456" not in text
        assert "tenant" not in text


def test_an_unwatched_cell_does_no_work_for_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before the first watcher nor after the last one left."""
    made: list[Chronicle] = []
    original = Chronicle.__init__

    def init(self: Chronicle, now: float) -> None:
        made.append(self)
        original(self, now)

    monkeypatch.setattr(Chronicle, "__init__", init)
    watched = Watched(SimulatedCell(num_workers=2))
    sim = watched.sim

    def work() -> None:
        sim.submit(prompt_of(50), 20)
        sim.run()
        device = sim.kill(sim.cell.members[0])
        assert sim.cell.book.chronicle is None
        sim.attach(device)

    work()
    assert made == []
    with watched.view.watching(), watched.view.watching():
        assert len(made) == 1
    looks = [name for name in vars(Chronicle) if not name.startswith("__")]
    for name in looks:
        monkeypatch.setattr(Chronicle, name, lambda *_: pytest.fail("an event was told"))
    work()
    assert len(made) == 1


def test_watchers_share_pictures() -> None:
    watched = Watched(SimulatedCell(settings=SchedulerSettings()))

    async def look() -> None:
        with watched.view.watching(), watched.view.watching():
            pictures = await asyncio.gather(*(watched.view.picture_json() for _ in range(5)))
            assert all(picture is pictures[0] for picture in pictures)
            watched.sim.clock.advance(0.1)
            assert await watched.view.picture_json() is not pictures[0]

    asyncio.run(look())


# ---- block maps


def draw(pool: BlockPool) -> block_map.BlockMap:
    return asyncio.run(draw_map(pool))


def test_a_small_pool_is_drawn_block_by_block() -> None:
    pool = BlockPool(9)
    first = pool.allocate(4)  # blocks 1 .. 4
    pool.touch(first[:1])
    pool.index(first[1], b"a" * 16)
    pool.index(first[2], b"b" * 16)
    pool.free(first[1:2])
    drawn = draw(pool)
    assert drawn.cells == {"shared": "f0000000", "cached": "0f000000", "used": "00ff0000"}
    assert drawn.num_shared == 1


def test_a_cell_is_the_mix_of_its_blocks() -> None:
    pool = BlockPool(4 * MAX_CELLS + 1)
    blocks = pool.allocate(4 * MAX_CELLS)
    pool.free([block for block in blocks if block % 4 == 0])  # a quarter of each cell
    pool.touch([1])
    drawn = draw(pool)
    assert drawn.cells["used"] == "8" + "b" * (MAX_CELLS - 1)
    assert drawn.cells["shared"] == "4" + "0" * (MAX_CELLS - 1)
    assert drawn.cells["cached"] == "0" * MAX_CELLS


@pytest.mark.parametrize("num_usable", [1, 511, 513, 5000, MAX_BLOCKS, MAX_BLOCKS + 1, 300_000])
def test_a_map_is_bounded_however_large_the_pool(num_usable: int) -> None:
    pool = BlockPool(num_usable + 1)
    blocks = pool.allocate(num_usable)
    pool.touch(blocks[: num_usable // 2])
    looks: list[int] = []
    original = pool.states_of

    def states_of(chosen: slice) -> Any:
        looks.append(len(range(*chosen.indices(pool.num_blocks))))
        return original(chosen)

    pool.states_of = states_of  # type: ignore[method-assign]
    drawn = draw(pool)
    assert sum(looks) <= MAX_BLOCKS
    assert max(looks) <= 2048
    assert {len(cells) for cells in drawn.cells.values()} == {min(num_usable, MAX_CELLS)}
    assert drawn.num_shared == pytest.approx(num_usable // 2, rel=0.01, abs=1)


def test_states_are_what_the_counters_say() -> None:
    rng = np.random.default_rng(3)
    pool = BlockPool(200)
    held: list[list[int]] = []
    for number in range(300):
        if held and (rng.random() < 0.5 or pool.num_free < 10):
            pool.free(held.pop(int(rng.integers(len(held)))))
            continue
        blocks = pool.allocate(int(rng.integers(1, 8)))
        pool.index(blocks[0], number.to_bytes(16, "little"))
        held.append(blocks)
        if rng.random() < 0.3:
            pool.touch(blocks)
            held.append(list(blocks))
        states = pool.states_of(slice(1, None))
        counts = {state: int(np.count_nonzero(states == state)) for state in BlockState}
        assert counts[BlockState.USED] + counts[BlockState.SHARED] == pool.num_used
        assert counts[BlockState.CACHED] == pool.num_cached

"""The limit of open files: raised as far as the system lets us, never a reason not to start."""

import resource

import pytest

from octavo_router.wiring import connections_within, raise_file_limit

INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "most", "limit"),
    [
        (1024, 4096, INFINITE, 4096),
        (1024, 1 << 20, INFINITE, 1 << 16),
        (1 << 18, 1 << 20, INFINITE, 1 << 18),
        (1024, INFINITE, INFINITE, 1 << 16),
        (INFINITE, INFINITE, INFINITE, 1 << 16),
        # macOS: an infinite limit that takes no more than a number of the kernel's.
        (256, INFINITE, 61_440, 10_240),
        (256, INFINITE, 1000, 256),
        (20_000, INFINITE, 61_440, 20_000),
    ],
)
def test_the_limit(
    soft: int, hard: int, most: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []

    def set_limit(_: int, limits: tuple[int, int]) -> None:
        if most != INFINITE and limits[0] > most:
            raise ValueError("current limit exceeds maximum limit")
        made.append(limits)

    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    assert raise_file_limit() == limit
    # Nothing is set that is there already.
    is_there = soft in (limit, INFINITE)
    assert made == ([] if is_there else [(limit, hard)])


@pytest.mark.parametrize(
    ("limit", "connections"), [(1 << 16, (1 << 16) - 256), (1024, 768), (256, 128), (10, 5)]
)
def test_a_low_limit_leaves_room_for_connections(limit: int, connections: int) -> None:
    assert connections_within(limit) == connections

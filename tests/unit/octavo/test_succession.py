"""Who takes over: everybody who sees the same ids says the same."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from octavo.succession import choose, successor

IDS = st.lists(st.text("abc-0123456789", min_size=1, max_size=8), unique=True, max_size=8)


@given(IDS, st.text(max_size=8), st.randoms())
def test_a_successor_is_another_whatever_the_order(
    ids: list[str], lost: str, random: object
) -> None:
    heir = successor(ids, lost)
    shuffled = ids[:]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert heir == successor(shuffled, lost)
    # It makes no difference whether the lost one is still among those seen.
    assert heir == successor([*ids, lost], lost) == successor([i for i in ids if i != lost], lost)
    others = set(ids) - {lost}
    assert (heir in others) if others else (heir is None)


@given(IDS, st.binary(max_size=16))
def test_who_comes_or_goes_changes_nothing_for_others(ids: list[str], key: bytes) -> None:
    chosen = choose(ids, key)
    for gone in ids:
        if gone != chosen:
            assert choose([name for name in ids if name != gone], key) == chosen


def test_inheritances_spread() -> None:
    names = [f"cell-{i}" for i in range(5)]
    heirs = Counter(successor(names, f"lost-{i}") for i in range(200))
    assert set(heirs) == set(names)
    assert min(heirs.values()) >= 20

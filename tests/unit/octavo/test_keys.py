"""Redis keys: their names are a contract between versions, and lie in one cluster slot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from octavo.errors import ConfigurationError
from octavo.keys import FleetKeys, Member, MemberKind, format_member, parse_member


def test_the_names_are_the_documented_ones() -> None:
    keys = FleetKeys("llama")
    assert keys.worker("w1") == "octavo:{llama}:worker:w1"
    assert keys.usage("w1") == "octavo:{llama}:usage:w1"
    assert keys.scheduler("s1") == "octavo:{llama}:scheduler:s1"
    assert keys.filter("s1") == "octavo:{llama}:filter:s1"
    assert keys.members == "octavo:{llama}:members"


@pytest.mark.parametrize("kind", list(MemberKind))
def test_a_member_leads_to_its_hash(kind: MemberKind) -> None:
    keys = FleetKeys("llama")
    assert keys.of_member(Member(kind, "x")) == getattr(keys, kind.value)("x")


fleets = st.text(st.characters(exclude_characters="{}", codec="utf-8"), min_size=1, max_size=50)
ids = st.text(st.characters(codec="utf-8"), max_size=50)


@given(fleets, ids)
def test_all_keys_of_a_fleet_lie_in_one_slot(fleet: str, name: str) -> None:
    keys = FleetKeys(fleet)
    names = [
        *(keys.worker(name), keys.usage(name), keys.scheduler(name), keys.filter(name)),
        keys.members,
    ]
    assert len({key_slot(name.encode()) for name in names}) == 1
    assert len(set(names)) == len(names)


@given(st.sampled_from(MemberKind), ids)
def test_members_survive_the_way(kind: MemberKind, name: str) -> None:
    assert parse_member(format_member(Member(kind, name))) == Member(kind, name)


@pytest.mark.parametrize("text", ["", "worker", "planet:mars", ":x", "Worker:x"])
def test_unknown_members_are_passed_over(text: str) -> None:
    expected = Member(MemberKind.WORKER, "") if text == "worker" else None
    assert parse_member(text) == expected


@pytest.mark.parametrize("fleet", ["", "a{b", "a}b", "{}", "x" * 201])
def test_a_name_that_is_no_hash_tag_is_refused(fleet: str) -> None:
    with pytest.raises(ConfigurationError, match="OCTAVO_FLEET"):
        FleetKeys(fleet)

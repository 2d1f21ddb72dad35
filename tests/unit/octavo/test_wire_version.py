"""Which wire versions work together."""

import pytest

from octavo import wire_version
from octavo.errors import FailedPreconditionError
from octavo.wire_version import check_wire_version


@pytest.fixture(autouse=True)
def fifth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_version, "WIRE_VERSION", 5)


@pytest.mark.parametrize("version", [4, 5, 6])
def test_neighbours_work_together(version: int) -> None:
    check_wire_version("worker w1", version)


@pytest.mark.parametrize(("version", "older"), [(3, "worker w1"), (7, "this process")])
def test_others_are_refused_by_name(version: int, older: str) -> None:
    with pytest.raises(FailedPreconditionError) as caught:
        check_wire_version("worker w1", version)
    message = caught.value.message
    assert message.startswith(f"worker w1 speaks wire version {version}, this process 5: ")
    assert message.endswith(f"upgrade {older}")

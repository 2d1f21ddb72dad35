"""What operators may write as quotas."""

import pytest

from octavo.errors import ConfigurationError
from octavo_router.quota import Quota, QuotaTable


def test_quotas_by_tenant_and_for_the_others() -> None:
    table = QuotaTable.from_setting(
        ("acme=60r/m:100000t/m", "b=c=5r/m", "free=1000t/m", "*=2r/m: 7t/m")
    )
    assert table
    assert table.of("acme") == Quota(60, 100_000)
    assert table.of("b=c") == Quota(5, 0)
    assert table.of("free") == Quota(0, 1000)
    assert table.of("") == table.of("whoever") == Quota(2, 7)


def test_without_a_default_others_have_no_limit() -> None:
    assert QuotaTable.from_setting(("acme=60r/m",)).of("other") is None
    nothing = QuotaTable.from_setting(())
    assert not nothing
    assert nothing.of("acme") is None


@pytest.mark.parametrize(
    "parts",
    [
        *(("acme",), ("=60r/m",), ("acme=",), ("acme=60",), ("acme=60r",), ("acme=0r/m",)),
        *(("acme=60r/s",), ("acme=-1r/m",), ("acme=60r/m:60r/m",), ("acme=1.5r/m",)),
        *(("acme=60r/m", "acme=5t/m"), ("acme=60r/m:",), ("*=x",), ("acme=9999999999999r/m",)),
    ],
)
def test_mistakes_name_the_variable(parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"^OCTAVO_TENANT_QUOTAS: ") as caught:
        QuotaTable.from_setting(parts)
    assert caught.value.param == "tenant_quotas"

"""One validation for both doors: what passes, what doesn't, and what the error says."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidRequestError
from octavo_router.generation_defaults import GenerationDefaults
from octavo_router.params import parse_sampling

VOCAB = 1000
DEFAULTS = GenerationDefaults()
NAN, INF = math.nan, math.inf

BAD: list[tuple[str, Any]] = [
    *(("temperature", v) for v in (NAN, INF, -INF, -0.1, 2.01, 1e6, True, False, "0.5", "NaN")),
    *(("temperature", v) for v in ([], {}, [0.5], 10**400)),
    *(("top_p", v) for v in (NAN, INF, -0.1, 1.0000001, 7, True, "1", [1])),
    *(("top_k", v) for v in (-2, 0.01, 5.0, 1e12, 2**31, NAN, True, "5", [5])),
    *(("min_p", v) for v in (NAN, -0.1, 2, INF, "0", False)),
    *(("seed", v) for v in (-(2**63) - 1, 2**63, 2**64, 1.5, 1.0, NAN, "7", True, [])),
    *(("n", v) for v in (0, -1, 129, 1.5, 2.0, "2", True, [1])),
    *(("max_tokens", v) for v in (0, -1, 1.5, 16.0, 2**31, "16", True, {}, NAN)),
    *(("logprobs", v) for v in (-1, 21, 1.0, True, False, "1")),
    *(("ignore_eos", v) for v in (0, 1, "true", [])),
    *(("stop", v) for v in (5, True, "", [""], ["a", 5], ["a", None], {}, "x" * 1025, ["a"] * 17)),
    *(
        ("stop_token_ids", v)
        for v in (5, "5", [-1], [VOCAB], [2**63], [1.0], ["1"], [True], [None])
    ),
    ("stop_token_ids", [1] * 129),
]


def param_of(field: str, error: InvalidRequestError) -> bool:
    return error.param == field or (error.param or "").startswith(f"{field}[")


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda v: repr(v)[:24])
def test_bad_values(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_sampling({field: value}, DEFAULTS, VOCAB)
    error = caught.value
    assert param_of(field, error)
    assert error.message.startswith(str(error.param))
    assert " must be " in error.message
    assert ", got " in error.message
    assert len(error.message) < 250
    assert error.message.isascii()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("stop", "", "stop must be between 1 and 1024 characters long, got 0"),
        ("stop", ["a", "x" * 1025], "stop[1] must be between 1 and 1024 characters long, got 1025"),
        ("stop", ["a"] * 17, "stop must be at most 16 strings, got 17"),
        ("stop_token_ids", [1] * 129, "stop_token_ids must be at most 128 token ids, got 129"),
        ("seed", "7", 'seed must be an integer, got "7"'),
    ],
)
def test_a_number_too_many_is_not_quoted_as_if_it_were_the_value(
    field: str, value: Any, says: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_sampling({field: value}, DEFAULTS, VOCAB)
    assert caught.value.message == says


def test_there_are_enough_bad_values() -> None:
    assert len(BAD) >= 60


@pytest.mark.parametrize(
    ("field", "value", "attribute", "parsed"),
    [
        ("temperature", 0, "temperature", 0.0),
        ("temperature", 2, "temperature", 2.0),
        ("temperature", 1e-320, "temperature", 0.0),
        ("temperature", 1e-6, "temperature", 0.0),
        ("temperature", -0.0, "temperature", 0.0),
        ("top_p", 1, "top_p", 1.0),
        ("top_p", 0, "temperature", 0.0),
        ("top_p", -0.0, "temperature", 0.0),
        ("top_k", -1, "top_k", 0),
        ("top_k", 0, "top_k", 0),
        ("top_k", VOCAB - 1, "top_k", VOCAB - 1),
        ("top_k", VOCAB, "top_k", 0),
        ("top_k", VOCAB + 1, "top_k", 0),
        ("min_p", 1, "min_p", 1.0),
        ("seed", -(2**63), "seed", -(2**63)),
        ("seed", 2**63 - 1, "seed", 2**63 - 1),
        ("seed", 0, "seed", 0),
        ("n", 128, "n", 128),
        ("max_tokens", 1, "max_tokens", 1),
        ("logprobs", 0, "logprobs", 0),
        ("logprobs", 20, "logprobs", 20),
        ("stop", "x" * 1000, "stop", ("x" * 1000,)),
        ("stop", [], "stop", ()),
        ("stop", ["a", "a"], "stop", ("a", "a")),
        ("stop_token_ids", [0, VOCAB - 1], "stop_token_ids", (0, VOCAB - 1)),
        ("ignore_eos", True, "ignore_eos", True),
    ],
)
def test_good_values(field: str, value: Any, attribute: str, parsed: Any) -> None:
    options = parse_sampling({field: value}, DEFAULTS, VOCAB)
    result = getattr(options, attribute)
    assert (result, type(result)) == (parsed, type(parsed))


@pytest.mark.parametrize("field", sorted({field for field, _ in BAD}))
def test_null_is_absent(field: str) -> None:
    assert parse_sampling({field: None}, DEFAULTS, VOCAB) == parse_sampling({}, DEFAULTS, VOCAB)


def test_defaults_are_the_models() -> None:
    model = GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1)
    options = parse_sampling({}, model, VOCAB)
    assert (options.temperature, options.top_p) == (0.6, 0.9)
    assert (options.top_k, options.min_p) == (20, 0.1)
    options = parse_sampling({"temperature": 0.1, "top_p": 1, "top_k": 0, "min_p": 0}, model, VOCAB)
    assert (options.temperature, options.top_p) == (0.1, 1.0)
    assert (options.top_k, options.min_p) == (0, 0.0)


@given(
    st.dictionaries(
        st.sampled_from(sorted({field for field, _ in BAD})),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.lists(st.integers()),
    )
)
def test_anything_is_parsed_or_refused(raw: dict[str, Any]) -> None:
    try:
        options = parse_sampling(raw, DEFAULTS, VOCAB)
    except InvalidRequestError:
        return
    assert 0 <= options.temperature <= 2
    assert 0 < options.top_p <= 1
    assert 0 <= options.top_k < VOCAB
    assert 1 <= options.n <= 128

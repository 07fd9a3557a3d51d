"""Sampling parameters: refused early in one sentence, kept exactly in records."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.runtime.errors import BadParameter
from serai.runtime.sampling.params import MAX_STOPS, SamplingParams


@pytest.mark.parametrize("value", [10**18 * 10, 0, -1, True, "5", 2.0, 1e18, None, math.nan])
def test_a_max_tokens_that_is_no_count_is_refused(value: Any) -> None:
    """B95."""
    with pytest.raises(BadParameter, match="max_tokens must be"):
        SamplingParams(max_tokens=value)


@pytest.mark.parametrize("value", [1, 2147483647, 10**18, np.int32(5)])
def test_any_positive_integer_is_a_max_tokens(value: Any) -> None:
    """B95: nothing is allocated by it, so there is nothing to cut silently."""
    assert SamplingParams(max_tokens=value).max_tokens == int(value)
    assert type(SamplingParams(max_tokens=value).max_tokens) is int


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, bad) for name in ("temperature", "top_p", "min_p") for bad in (-0.1, math.nan, math.inf, "1", True)),
        *((name, bad) for name in ("presence_penalty", "frequency_penalty") for bad in (2.1, -2.1, math.nan, None)),
        *(("repetition_penalty", bad) for bad in (0, -1.0, math.inf, math.nan, False)),
        *(("top_p", bad) for bad in (0.0, 1.0001)),
        ("min_p", 1.5),
        ("temperature", 10**400),
        *(("top_k", bad) for bad in (-1, 1.0, True, "1")),
        *(("seed", bad) for bad in (-1, 2**64, 1.0, "7", True)),
        *(("logprobs", bad) for bad in (-1, 21, True, 1.5)),
        *(("min_tokens", bad) for bad in (-1, 513, True)),
        *(("ignore_eos", bad) for bad in (1, None, "yes")),
        *(
            ("logit_bias", bad)
            for bad in ({-1: 1.0}, {1: 101.0}, {1: math.nan}, {"1": 1.0}, {True: 1.0}, [[1, 1.0]], 3)
        ),
        *(("stop", bad) for bad in ("", ["a", ""], [1], 5, ["x" * 1025], ["\ud800"], ["a"] * (MAX_STOPS + 1))),
        *(("stop_token_ids", bad) for bad in ([-1], [1.0], [True], "12", 5)),
    ],
)
def test_a_value_that_cannot_be_right_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadParameter, match="stop" if name == "stop" else name) as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 220


def test_values_are_kept_in_plain_and_frozen_form() -> None:
    given_bias = {3: 1}
    given_stops = ["a", "b"]
    numpys: dict[str, Any] = {"temperature": np.float32(0.5), "top_k": np.int64(3)}
    params = SamplingParams(**numpys, logit_bias=given_bias, stop=given_stops, stop_token_ids=[7])
    given_bias[4] = 2
    given_stops.append("c")
    assert (params.temperature, params.top_k) == (0.5, 3)
    assert (type(params.temperature), type(params.top_k)) == (float, int)
    assert (dict(params.logit_bias), params.stop, params.stop_token_ids) == ({3: 1.0}, ("a", "b"), (7,))
    with pytest.raises(TypeError):
        params.logit_bias[3] = 5.0  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 3  # type: ignore[misc]
    assert hash(params) == hash(dataclasses.replace(params))


def test_one_stop_string_may_be_given_plainly() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


def test_ids_past_the_vocabulary_are_found_before_they_are_used() -> None:
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9]).check_vocabulary(10)
    for params in (SamplingParams(logit_bias={10: 1.0}), SamplingParams(stop_token_ids=[3, 10])):
        with pytest.raises(BadParameter, match="has the token id 10, but the model's ids end at 9"):
            params.check_vocabulary(10)


UNIT = st.floats(0.0, 1.0)


@given(
    st.builds(
        SamplingParams,
        max_tokens=st.integers(100, 2**63 - 1),
        temperature=st.floats(0.0, 1e300),
        top_k=st.integers(0, 2**40),
        top_p=st.floats(0.0, 1.0, exclude_min=True),
        min_p=UNIT,
        repetition_penalty=st.floats(0.0, 10.0, exclude_min=True),
        presence_penalty=st.floats(-2.0, 2.0),
        frequency_penalty=st.floats(-2.0, 2.0),
        logit_bias=st.dictionaries(st.integers(0, 2**40), st.floats(-100.0, 100.0), max_size=4),
        seed=st.none() | st.integers(0, 2**64 - 1),
        stop=st.lists(st.text(min_size=1, max_size=8), max_size=3),
        stop_token_ids=st.lists(st.integers(0, 2**40), max_size=3),
        min_tokens=st.integers(0, 100),
        ignore_eos=st.booleans(),
        logprobs=st.none() | st.integers(0, 20),
    )
)
def test_a_record_in_json_gives_an_equal_object_back(params: SamplingParams) -> None:
    text = json.dumps(params.to_record(), allow_nan=False)
    again = SamplingParams.from_record(json.loads(text))
    assert again == params
    assert json.dumps(again.to_record()) == text


def test_a_record_that_lacks_names_takes_defaults_and_unknown_ones_are_refused() -> None:
    assert SamplingParams.from_record({}) == SamplingParams()
    with pytest.raises(BadParameter, match="no parameter 'mirostat'"):
        SamplingParams.from_record({"mirostat": 2})
    with pytest.raises(BadParameter, match=r"list of \[id, bias\] pairs"):
        SamplingParams.from_record({"logit_bias": [1, 2]})

"""The spread that `serai bench tree` states with a gain."""

import numpy as np
import pytest

from serai.runtime.bench.guessing import median_interval


@pytest.mark.parametrize("count", [6, 9, 25, 40])
def test_the_median_lies_within_its_interval_as_often_as_is_said(count: int) -> None:
    rng = np.random.default_rng(1)
    drawn = [rng.exponential(size=count).tolist() for _ in range(2_000)]
    held = np.mean([low <= np.log(2) <= high for low, high in map(median_interval, drawn)])
    assert 0.94 <= held <= 0.985


def test_few_values_say_no_more_than_that_it_is_among_them() -> None:
    assert median_interval([1.0]) == (1.0, 1.0)
    assert median_interval([3.0, 1.0, 2.0, 5.0]) == (1.0, 5.0)

"""Options of `gpu`: which values are taken, as what, and how the others are refused."""

from __future__ import annotations

import math
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerogpu.options import Options, check, seconds


class TestDuration:
    def test_it_is_a_minute_when_nothing_is_said(self) -> None:
        assert check({}) == Options(duration=60.0)

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (30, 30.0),
            (0.25, 0.25),
            (np.float32(1.5), 1.5),
            (np.float16(2), 2.0),
            (np.int8(3), 3.0),
            (np.uint64(4), 4.0),
            (np.array(5), 5.0),
            (torch.tensor(6.5), 6.5),
            (torch.tensor(7, dtype=torch.bfloat16), 7.0),
            (Fraction(1, 4), 0.25),
            (Decimal("2.5"), 2.5),
            (timedelta(minutes=2), 120.0),
            (timedelta(days=60), 60 * 86400.0),
        ],
    )
    def test_any_kind_of_number_is_taken(self, value: Any, expected: float) -> None:
        duration = check({"duration": value}).duration
        assert duration == expected
        assert type(duration) is float

    @pytest.mark.parametrize(
        "value",
        [
            -1,
            0,
            0.0,
            -0.0,
            math.nan,
            math.inf,
            -math.inf,
            10**400,
            np.float64("nan"),
            Decimal("NaN"),
            Decimal("sNaN"),
            Decimal("Infinity"),
            Fraction(-1, 2),
            Fraction(10**400),
            timedelta(0),
            timedelta(seconds=-1),
        ],
    )
    def test_a_number_that_is_no_duration_is_a_value_error(self, value: Any) -> None:
        with pytest.raises(ValueError, match=r"duration=.*positive, finite number of seconds"):
            check({"duration": value})

    @pytest.mark.parametrize(
        "value",
        [
            True,
            False,
            np.bool_(True),
            np.array(True),
            "30",
            np.str_("30"),
            b"30",
            None,
            3 + 0j,
            np.complex64(3),
            np.array([30]),
            torch.tensor([30]),
            np.timedelta64(30, "m"),  # a float of it would be 30, whatever its unit
            [30],
            {},
        ],
    )
    def test_what_is_not_a_number_is_a_type_error(self, value: Any) -> None:
        with pytest.raises(TypeError, match=r"duration=.*seconds as a number or a timedelta"):
            check({"duration": value})

    def test_a_callable_stays_as_it_is(self) -> None:
        def estimate() -> float:
            return 3

        options = check({"duration": estimate})
        assert options.duration is estimate
        assert options.seconds((), {}, "f") == 3.0

    @given(st.floats())
    def test_a_float_is_taken_exactly_when_it_is_positive_and_finite(self, value: float) -> None:
        if math.isfinite(value) and value > 0:
            assert seconds(value, "duration") == value
        else:
            with pytest.raises(ValueError, match="duration="):
                seconds(value, "duration")


class TestOtherOptions:
    @pytest.mark.parametrize("size", ["large", "xlarge"])
    def test_the_sizes_are_taken(self, size: str) -> None:
        assert check({"size": size}).size == size

    @pytest.mark.parametrize("size", ["medium", "LARGE", 1, None, ["large"]])
    def test_another_size_is_refused_with_those_there_are(self, size: Any) -> None:
        with pytest.raises(ValueError, match="'large', 'xlarge'"):
            check({"size": size})

    @pytest.mark.parametrize(
        ("memory", "expected"),
        [
            (None, None),
            (1, 1),
            (2.5e9, 2_500_000_000),
            (np.int64(7), 7),
            ("512", 512),
            ("6GiB", 6 * 2**30),
            ("6 gib", 6 * 2**30),
            ("1.5G", 1_500_000_000),
            (" 10 MB ", 10_000_000),
            ("3k", 3000),
            ("1TiB", 2**40),
        ],
    )
    def test_memory_is_bytes_or_a_text_with_a_unit(self, memory: Any, expected: int | None) -> None:
        assert check({"memory": memory}).memory == expected

    @pytest.mark.parametrize(
        "memory", [0, -1, 0.5, math.nan, math.inf, "0", "0.1", "", "six", "6 apples", "-1G", "1e999G"]
    )
    def test_an_impossible_memory_is_a_value_error_with_an_example(self, memory: Any) -> None:
        with pytest.raises(ValueError, match=r'memory=.*"6GiB"'):
            check({"memory": memory})

    @pytest.mark.parametrize("memory", [True, [6], {}, 3j])
    def test_memory_of_another_type_is_a_type_error(self, memory: Any) -> None:
        with pytest.raises(TypeError, match="memory="):
            check({"memory": memory})

    @pytest.mark.parametrize("batch", [1, 0, "yes", None, np.bool_(True)])
    def test_batch_is_true_or_false(self, batch: Any) -> None:
        assert check({"batch": True}).batch is True
        with pytest.raises(TypeError, match=r"batch=.*True or False"):
            check({"batch": batch})

    @pytest.mark.parametrize(
        ("most", "error"),
        [
            (0, ValueError),
            (-3, ValueError),
            (2.0, TypeError),
            ("8", TypeError),
            (True, TypeError),
            (None, TypeError),
        ],
    )
    def test_max_batch_size_is_a_whole_number_of_at_least_one(
        self, most: Any, error: type[Exception]
    ) -> None:
        assert check({"max_batch_size": np.int32(4)}).max_batch_size == 4
        with pytest.raises(error, match="max_batch_size="):
            check({"max_batch_size": most})

    @pytest.mark.parametrize("wait", [-0.1, math.nan, math.inf])
    def test_batch_wait_may_be_zero_but_not_negative(self, wait: float) -> None:
        assert check({"batch_wait": 0}).batch_wait == 0.0
        assert check({"batch_wait": timedelta(milliseconds=20)}).batch_wait == 0.02
        with pytest.raises(ValueError, match=r"batch_wait=.*0 seconds or more"):
            check({"batch_wait": wait})

    def test_batch_wait_of_another_type_is_a_type_error(self) -> None:
        with pytest.raises(TypeError, match="batch_wait="):
            check({"batch_wait": "soon"})

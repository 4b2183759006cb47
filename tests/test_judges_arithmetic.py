"""Equations found in steps, whether they hold, and the judge that looks at them."""

from __future__ import annotations

import asyncio
from fractions import Fraction
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mintrl_env.arithmetic import find_equations, written
from mintrl_env.errors import UsageError
from mintrl_env.judge_bench import judge_env_gain
from mintrl_env.judges_arithmetic import ArithmeticJudge
from mintrl_env.registry import resolve
from mintrl_env.types import Finish, ReviewRequest, Step, Task, Verdict, VerdictKind, frozen_ids


def wrong(text: str) -> list[str]:
    return [text[e.start : e.end] for e in find_equations(text) if not e.holds]


def right(text: str) -> list[str]:
    return [text[e.start : e.end] for e in find_equations(text) if e.holds]


class TestFound:
    @pytest.mark.parametrize(
        ("text", "equation"),
        [
            ("So 3 * 4 = 13 apples.", "3 * 4 = 13"),
            ("Then 48/2 = <<48/2=25>>25 clips", "48/2=25"),
            ("She pays $5 x 3 = $16.", "$5 x 3 = $16"),
            ("5 apples * 4 = 21", "5 apples * 4 = 21"),
            ("7 pizzas * 8 slices/pizza = 57 slices", "7 pizzas * 8 slices/pizza = 57"),
            ("1,234 + 1 = 1,236", "1,234 + 1 = 1,236"),
            ("20% of 50 = 11", "20% of 50 = 11"),
            (r"$8 \times 7 = 54$", r"$8 \times 7 = 54"),
            (r"\frac{1}{2} + \frac{1}{2} = 2", r"\frac{1}{2} + \frac{1}{2} = 2"),
            ("(2 + 3 = 6)", "2 + 3 = 6"),
            ("1) 2+3=6", "2+3=6"),
            ("- 2 + 3 = 6", "2 + 3 = 6"),
            ("2^3 = 9", "2^3 = 9"),
            ("12 − 5 = 6", "12 − 5 = 6"),
            ("A = (-5 - 9 + 8) = -7", "(-5 - 9 + 8) = -7"),
            ("7(23) + 5 = 164", "7(23) + 5 = 164"),
            ("12 = 5 + 8", "12 = 5 + 8"),
            ("0.1 + 0.2 = 0.4", "0.1 + 0.2 = 0.4"),
            ("1/3 = 0.35", "1/3 = 0.35"),
            ("2.5 * 3 = 7", "2.5 * 3 = 7"),
        ],
    )
    def test_wrong_ones(self, text: str, equation: str) -> None:
        assert wrong(text) == [equation]

    @pytest.mark.parametrize(
        "text",
        [
            "10/3 = 3.33", "10/3 = 3", "7/2 = 4", "2/3 = 0.67", "1/3 = 33%", "5/20 = 25%",
            "(80-60)/60 * 100 = 33%", "0.15 * 200 = 30%", "3(4+5)=27", "-58 - (-70) = 12",
            "2 + 3 = 5 = 10/2", "100 * 0.75 = $0.75", "5kg + 3kg = 8kg",
        ],
    )  # fmt: skip
    def test_right_ones_rounding_allowed_for(self, text: str) -> None:
        assert right(text) and not wrong(text)

    @pytest.mark.parametrize(
        "text",
        [
            "x + 2 + 3 = 6", "3x = 6", "2ab + 3 = 9", "5 * x = 26", "f(2) = 3 + 1", "a_1 + 2 = 9",
            "1 1/2 + 1 = 9", "80 000 x 2 = 9", "250 x 12 = 3 000", "7 + 8 = 3 mod 12",
            "7 mod 4 + 1 = 3", "half of 3 + 5 = 4", "11_2 + 1 = 100_2", "9:30 - 8:00 = 1:30",
            "0900 - 0130 = 0730", "2 hours + 30 minutes = 150 minutes", "3 dozen * 4 = 144",
            "12 dollars per hour * 3 = 36", "25 / 1/3 = 75", "8/2(2+2) = 1", "5! + 1 = 121",
            "|x| - 3 + 2 = 5", "Anna has 3 = 2 + 2", "2 >= 1 + 4", "2 == 1 + 4", "1 / 0 = 5",
            "10^99999 = 1", "2 + 3 =", "= 5", "20 minutes / 240 minutes = 8.333...%",
            "2 sin 3 + 1 = 9", "2 hours * 60 = 130 minutes",
        ],
    )  # fmt: skip
    def test_what_is_not_understood_is_passed_over(self, text: str) -> None:
        assert wrong(text) == []

    def test_a_chain_is_several(self) -> None:
        assert wrong("(12 + -70) - (-70) = -58 - (-70) = 13") == ["-58 - (-70) = 13"]

    @given(
        st.integers(-999, 999),
        st.sampled_from("+-*"),
        st.integers(0, 999),
        st.integers(-50, 50),
        st.sampled_from(["so ", "Then we get: ", "", "- ", "3. "]),
        st.sampled_from([".", " apples", "\n\n", ", which is it", ""]),
    )
    @example(3, "*", 4, 1, "so ", ".")
    def test_sums_and_products_of_integers(
        self, a: int, sign: str, b: int, off: int, head: str, tail: str
    ) -> None:
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        text = f"{head}{a} {sign} {b} = {value + off}{tail}"
        found = find_equations(text)
        if head == "so " and a < 0:  # after a word a minus may be anything
            assert found == []
            return
        (equation,) = found
        assert equation.holds is (off == 0)
        assert equation.value == value
        assert text[equation.right_start : equation.end] == str(value + off)

    @given(st.text("0123456789+-*/=()., x$%^\\\n<>apfrc{}", max_size=60))
    def test_any_text_is_survived(self, text: str) -> None:
        for equation in find_equations(text):
            assert 0 <= equation.start < equation.right_start < equation.end <= len(text)

    def test_long_ones_are_survived(self) -> None:
        assert find_equations("(" * 5000 + "1" + ")" * 5000 + " = 2") == []
        assert find_equations("1 + " * 5000 + "1 = 2") == []
        assert find_equations("9" * 5000 + " + 1 = 2") == []


class TestWritten:
    @pytest.mark.parametrize(
        ("value", "like", "text"),
        [
            (Fraction(12), "13", "12"),
            (Fraction(-3), "13", "-3"),
            (Fraction(15), "$16", "$15"),
            (Fraction(1235), "1,236", "1,235"),
            (Fraction(5, 2), "2", "2.5"),
            (Fraction(5, 2), "$2.40", "$2.50"),
            (Fraction(1, 3), "0.3", "0.33"),
            (Fraction(1, 3), "0.345", "0.333"),
            (Fraction(1, 4), "30%", "25%"),
            (Fraction(1, 400), "1", "0.0025"),
        ],
    )
    def test_in_the_form_of_what_it_replaces(self, value: Fraction, like: str, text: str) -> None:
        assert written(value, like) == text


def request(steps: list[str], **changes: Any) -> ReviewRequest:
    parts = [Step(text, 0) for text in steps]
    settings: dict[str, Any] = {
        "task": Task("t", "p"), "prompt_ids": frozen_ids([1]), "accepted_ids": frozen_ids(()),
        "accepted_text": "", "chunk_ids": frozen_ids([1]), "steps": tuple(parts), "review": 0,
        "reviews_left": 0, "max_correction": 64, "finish": Finish.LENGTH,
    }  # fmt: skip
    return ReviewRequest(**(settings | changes))


def review(steps: list[str], judge: ArithmeticJudge | None = None, **changes: Any) -> Verdict:
    return asyncio.run((judge or ArithmeticJudge()).review(request(steps, **changes)))


class TestJudge:
    def test_the_first_wrong_step_with_its_correction(self) -> None:
        verdict = review(["2 + 3 = 5\n\n", "5 * 4 = 21 apples.\n\n", "21 - 1 = 19\n\n"])
        assert (verdict.kind, verdict.step) == (VerdictKind.REVISE, 1)
        assert verdict.correction == "5 * 4 = 20 apples.\n\n"
        assert verdict.reason == "5 * 4 = 20, not 21"
        assert verdict.usage.calls == 0

    def test_what_follows_goes_where_it_holds_digits(self) -> None:
        verdict = review(["So 5 * 4 = 21. With 21 apples\n\n"])
        assert verdict.correction == "So 5 * 4 = 20"

    def test_an_expression_is_replaced_by_its_value(self) -> None:
        verdict = review(["A = (4 - 9) - 2 = (4 - 7) = -3\n\n"])
        assert verdict.correction == "A = (4 - 9) - 2 = -7"

    def test_right_steps_are_kept(self) -> None:
        assert review(["2 + 3 = 5\n\n", "Done."]).kind is VerdictKind.KEEP

    def test_a_number_that_may_go_on_is_not_wrong_yet(self) -> None:
        assert review(["2 + 13 = 1"]).kind is VerdictKind.KEEP
        assert review(["2 + 0.5 = 2."]).kind is VerdictKind.KEEP
        assert review(["2 + 13 = 1"], finish=Finish.EOS).step == 0
        assert review(["2 + 13 = 1 "]).step == 0

    def test_an_equation_begun_in_the_accepted_text(self) -> None:
        verdict = review(["4 = 21 apples\n\n"], accepted_text="Good.\n\nSo 5 * ")
        assert (verdict.step, verdict.correction) == (0, "4 = 20 apples\n\n")
        # Its right side was accepted: nothing in the chunk can be pointed at.
        assert review([" apples\n\n"], accepted_text="5 * 4 = 21").kind is VerdictKind.KEEP

    def test_a_long_step_is_corrected_by_its_equation_alone(self) -> None:
        step = "Since there are many of them in the garden, we find that 5 * 4 = 21.\n\n"
        assert review([step], max_correction=8).correction == "5 * 4 = 20.\n\n"
        assert review([step], max_correction=64).correction == step.replace("21", "20")

    def test_bare_cuts(self) -> None:
        verdict = review(["5 * 4 = 21\n\n"], ArithmeticJudge(correct=False))
        assert (verdict.step, verdict.correction) == (0, "")
        with pytest.raises(UsageError, match="correct is True or False"):
            ArithmeticJudge(correct="yes")  # type: ignore[arg-type]

    def test_it_has_a_name(self) -> None:
        assert resolve("judge", "arithmetic") is ArithmeticJudge

    def test_it_helps_the_policy_that_can_not_add(self) -> None:
        env = gymnasium.make("MinTRL/Judge-v0")
        try:
            found = judge_env_gain(env, ArithmeticJudge(), episodes=24, seed=3)
        finally:
            env.close()
        # Two additions, each wrong with probability 0.4; the judge sees every one of them.
        assert found["intervened_reward"] == 1.0
        assert 0.1 < found["control_reward"] < 0.65
        assert found["reward_gain"] == pytest.approx(1.0 - found["control_reward"])
        assert found["reward_gain_ci95"][0] > 0.2
        assert np.isfinite(found["reward_gain_ci95"]).all()

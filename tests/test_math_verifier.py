"""The math verifier: what is extracted, what is equal, what is never paid, what cannot hang it."""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mintrl_env.protocols import Verifier
from mintrl_env.types import Score, Task
from mintrl_env.verifiers import worker
from mintrl_env.verifiers.math_answer import MathVerifier
from mintrl_env.verifiers.math_extract import extract

SHARED = Path(__file__).resolve().parents[2] / "shared"
VERIFIER = MathVerifier(workers=1)


def task(gold: str | None) -> Task:
    return Task("t", "?", gold)


def verdict(gold: str, response: str) -> Score:
    return VERIFIER.score_sync(task(gold), response)


def pays(gold: str, answer: str) -> bool:
    score = verdict(gold, f"So we get \\boxed{{{answer}}}.")
    assert score.status in ("correct", "wrong"), score
    assert score.reward == float(score.status == "correct")
    return score.status == "correct"


# --- extraction --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "parts"),
    [
        (r"thus \boxed{\frac{a}{b+{c}}}", (r"\frac{a}{b+{c}}",)),
        (r"thus $\boxed 6$, as said", ("6",)),
        (r"thus \boxed\pi.", (r"\pi",)),
        (r"thus \fbox { 9 }", ("9",)),
        (r"\boxed{8}, no, \boxed{11}", ("11",)),
        (r"\boxed{\boxed{4}}", ("4",)),
        (r"\boxed{\text{so } z = \boxed{4}}", ("4",)),
        (r"put it in \boxed{}: \boxed{2}", ("2",)),
        (r"$\boxed{2}$, $\boxed{3}$ and $\boxed{5}$", ("2", "3", "5")),
        (r"\boxed{9}. In short \boxed{9}", ("9",)),
        (r"\boxed{1} </think> The answer is 2.", ("2",)),
        (r"\boxed{1} ### Response: \boxed{3}", ("3",)),
        (r"an open { brace, then \boxed{5}", ("5",)),
        (r"set \boxed{\{1, 2\}} it is", (r"\{1, 2\}",)),
        ("The answer is 12.5. Done", ("12.5",)),
        ("Hence the final answer is $y = 3$ because of symmetry.", ("y = 3",)),
        ("**Answer:** 31", ("31",)),
        ("Answer:\n\n$$\n\\frac{1}{9}\n$$\n", (r"\frac{1}{9}",)),
        ("the answer is 4. Wait: the answer is 6", ("6",)),
        ("9*8=72\n#### 72", ("72",)),
        ("#### Step one\n#### 14", ("14",)),
        ("so it grows\n#### n^2 + n", ("n^2 + n",)),
        (r"#### (-\infty, 2)" "\n", (r"(-\infty, 2)",)),
        ("The answer is 8.\n#### Notes", ("8",)),
        ("因此答案是 8。", ("8",)),
        ("<answer>19</answer>", ("19",)),
        ("The answer is 19<|im_end|>", ("19",)),
        ("The correct option is D, not B.", ("D",)),
        (r"escaped twice: \\boxed{19}", ("19",)),
        (r"\boxed{3}, or rather \boxed{4}", ("4",)),
    ],
)
def test_what_is_found(response: str, parts: tuple[str, ...]) -> None:
    assert extract(response).parts == parts


@pytest.mark.parametrize(
    "response",
    [
        "",
        r"\boxed{}",
        r"\boxed{3} hmm, rather \boxed{4",
        r"\boxed{3} hmm, rather \boxed{ }",
        r"either \boxed{3} or \boxed{4}",
        r"\boxed{4} or possibly it could be \boxed{3}",
        r"<think>\boxed{3}</think> I give up.",
        "Perhaps 3, or else 4.",
        "#### Conclusion",
        "#### Part b\nso far",
    ],
)
def test_no_answer(response: str) -> None:
    assert extract(response).parts == ()
    assert verdict("3", response) == Score(0.0, "no_answer", extract(response).reason)


# --- equality ----------------------------------------------------------------------------------

EQUAL = [
    # a pair with its name, a length, an angle
    ("(2,7)", r"(x,y) = (2,7)"),
    (r"(a, b, c)=(2,7,1)", "(2,7,1)"),
    ("(2,7),(4,9)", r"(x,y)=(2,7)\text{ or }(x,y)=(4,9)"),
    ("(2,7),(4,9)", r"(p,q)\in\{(4,9),(2,7)\}"),
    (r"(r,\theta)=(3,\pi)", r"(3,\pi)"),
    ("x=2,y=7", "(x,y)=(2,7)"),
    ("8", r"|AB|=8"),
    ("8", r"\overline{PQ}=8"),
    ("40", r"m\angle PQR=40^\circ"),
    # what is only for the eye
    ("8", r"\color{red}{8}"),
    ("8", r"\textcolor{blue}{8}"),
    ("8", r"\underline{8}"),
    ("C", r"\text{Option C}"),
    # TeX's own infix forms
    (r"{6 \choose 2}", "15"),
    (r"15", r"{6 \choose 2}"),
    (r"{3 \over 4}", "0.75"),
    # numbers
    ("7", "7.00"), ("7", "+7"), ("-7", "−7"), ("0.75", r"\frac{3}{4}"), ("0.75", "75\\%"),
    ("75\\%", "75"), ("0.2", ".2"), (r"\frac{5}{6}", r"\dfrac56"),
    (r"-\frac{2}{3}", r"\frac{2}{-3}"),
    (r"\frac{7}{3}", r"2\frac{1}{3}"), ("2.25", "2 1/4"), ("1.75", "1¾"), ("4096", "4,096"),
    ("4096", r"4\,096"), ("4096", "4{,}096"), ("4,096", "4096"), ("65536", "2^{16}"),
    ("65536", r"4^8"), ("2500", r"2.5\times 10^3"), (r"0.1\overline{6}", r"\frac16"), ("24", "4!"),
    ("15", r"\binom{6}{2}"), ("3", r"\sqrt[3]{27}"), ("-2", r"\sqrt[3]{-8}"), ("8", "４+４"),
    ("3", r"\lfloor \pi \rfloor"), ("9", "|-9|"), ("12", r"\text{12}"), ("6", r"\mathbf{6}"),
    # irrational
    (r"3\sqrt{7}", r"\sqrt{63}"), (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt 3}{3}"),
    (r"4-\sqrt{3}", "4 - √3"), (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"), ("5", r"\log_3 243"),
    (r"2\ln 3", r"\ln 9"), (r"\frac{\sqrt3}{2}", r"\sin 60^\circ"), ("-1", r"e^{i\pi}"),
    (r"\sqrt[3]{7+5\sqrt2}", r"1+\sqrt2"), (r"(1+2i)^2", "-3+4i"),
    (r"\sqrt{4-2\sqrt3}", r"\sqrt3-1"), (r"\frac{2^{-1/2}}{3}", r"\frac{\sqrt2}{6}"),
    (r"\frac{\pi}{6}", "π/6"), (r"\frac{\pi}{2}", r"90^\circ"), ("55", r"\sum_{k=1}^{10} k"),
    (r"\frac{\pi^2}{6}", r"\sum_{k=1}^{\infty} \frac{1}{k^2}"), (r"\frac13", r"\int_0^1 x^2\,dx"),
    # symbols
    ("(a+b)^2", "a^2+2ab+b^2"), ("pq", "qp"), (r"\frac{m}{n}", "m/n"), ("y", r"\frac{y^2}{y}"),
    (r"\frac{1}{\sqrt{k}}", r"\sqrt{\frac1k}"), ("z³", "z^3"), (r"\cos 2t", r"1-2\sin^2 t"),
    (r"\frac{n(n+1)}{2}", r"\sum_{j=1}^{n} j"), ("|w|", r"\sqrt{w^2}"),
    ("n 2^{n-1}", r"2^{n-1}\cdot n"),
    # relations
    ("11", "z=11"), ("z=11", "11"), ("3t+1", "h(t)=3t+1"), ("y=3t+1", "3t+1"),
    ("21", r"3\cdot7=21"),
    ("PQ=13", "13"), ("y=2x-1", "4x-2y=2"), ("x^2+y^2=9", "y^2=9-x^2"), ("x<4", "4>x"),
    ("2x<8", "x<4"), (r"\frac17", r"p=\frac17\approx 0.143"),
    # collections
    ("2,9", "9,2"), (r"2\text{ and }9", "2, 9"), (r"\{2,9\}", r"\{9,2\}"),
    (r"z=2\text{ or }z=9", "2,9"),
    ("3,8", r"k\in\{8,3\}"), (r"k\in\{3,8\}", r"k=3\text{ or }k=8"), ("k=3", r"k\in\{3\}"),
    (r"(a,b)\in\{(3,8)\}", "(3,8)"),
    (r"\pm 6", "-6, 6"), (r"z=\pm 6", r"z=6\text{ or }z=-6"),
    (r"2\pm\sqrt5", r"2+\sqrt5, 2-\sqrt5"),
    ("(4,-1)", r"\left(4,\,-1\right)"), ("(1,2),(5,6)", "(5,6),(1,2)"),
    ("(0.5, 2)", r"(\frac12,\frac42)"),
    (r"\{1\}\cup\{2,3\}", r"\{3,2,1\}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    ("[1,4)", r"1\le x<4"), (r"(-\infty,0)\cup(0,\infty)", r"x\ne0"), (r"x\in[2,\infty)", r"x\ge2"),
    (r"\mathbb{R}", r"(-\infty,\infty)"), (r"(0,3)", r"(0,2]\cup(1,3)"), (r"\emptyset", r"\{\}"),
    ("5:4", "5 : 4"), (r"(3,\pm 1)", "(3,1),(3,-1)"), (r"\{z \mid z>1\}", r"(1,\infty)"),
    (r"\text{all real numbers}", r"\mathbb{R}"), (r"\{-6,6\}", r"\pm 6"),
    # units, bases, words, choices
    ("14", r"14\text{ kg}"), (r"14\text{ kg}", "14"), (r"14\text{ kilograms}", r"14\text{ kg}"),
    (r"9\pi\text{ cm}^2", r"9\pi\text{ square centimeters}"), (r"\$7.50", "7.5"),
    ("7.50", r"\$7.50"),
    ("45^\\circ", "45"), ("45", "45°"), ("6", r"6^{\text{th}}"), ("6", "6th"), ("6", "6 apples"),
    ("60 mph", r"60\text{ miles per hour}"), ("210_5", "210_{5}"), ("3F_{16}", r"\text{3F}_{16}"),
    (r"\text{Tuesday}", "tuesday"), (r"\text{no real roots}", r"\text{No real roots}"),
    ("D", r"\text{(D)}"), ("D", r"\textbf{(D)}\ 40"), ("40", r"\textbf{(D)}\ 40"),
    (r"\text{(D)}", "D"),
    ("7000", "7e3"), ("7000", r"7 x 10^3"), (r"\frac19", r"0.\bar{1}"), ("9", "9€"),
    (r"\frac{\sin t}{t}", r"\sin t/t"), (r"\frac12", r"\sin \pi/6"), (r"\frac14", r"\\frac14"),
    ("\frac{1}{4}", r"\frac14"), ("25°C", r"25^\circ\text{C}"),
    (r"z\equiv3\pmod 7", r"z\equiv 3 \pmod{7}"),
    ("9^{9^{9^9}}", "9^{9^{9^{9}}}"), ("2:45", r"2:45\text{ p.m.}"),
]  # fmt: skip

DIFFERENT = [
    ("(2,7)", "(x,y)=(7,2)"),
    ("(2,7)", "(y,x)=(2,7)"),
    ("(2,7)", "(x,y)=(2,7),(7,2)"),
    ("(2,7)", "(x,y)=(2,7)=(7,2)"),
    ("(2,7)", r"(x,y)\in(2,7)"),
    ("(a,b)", "(x,y)"),
    ("8", "|x|=8"),
    ("8", "|AB|^2=8"),
    ("8", r"\overline{AB}^2=8"),
    ("8", r"\overline{z}=8"),
    ("8", r"2\overline{AB}=8"),
    ("40", r"\angle A+\angle B=40^\circ"),
    ("40", r"m\angle A+m\angle B=40"),
    ("15", r"\underline{5}\,\underline{3}"),
    ("A", r"\text{Option C}"),
    ("7", "-7"), ("7", "7.01"), (r"\frac13", "0.333333333333"), (r"\pi", "3.14159"),
    (r"\sqrt2", "1.41421356"), ("300", "3"), (r"5\%", "5.1\\%"), ("0.5", "0,5"), ("57", "5 7"),
    ("57", "5,7"), ("987654321987654321", "987654321987654322"), ("0", "10^{-40}"),
    ("0", r"10^{-40}\pi"), (r"\sqrt3", r"\sqrt3+10^{-40}"), ("e^{5000}", "e^{5000}+1"),
    ("1500!", "1500!+1"), ("2^{3000000}", "2^{3000000}+1"),
    (r"2^{700}\sqrt{2^{1402}+2}-2^{1401}", "0"),
    (r"2^{900}\sqrt{2^{1800}+6}-2^{1800}", "3"),
    (r"\sqrt[3]{2^{600}+1}", "2^{200}"),
    (r"\frac{1}{1800!}", r"\frac{1}{1801!}"), ("2", r"\frac{2}{0}"), ("0", r"\frac00"),
    ("4", "z"), ("4", "4z"), ("4", "4k"), ("w", "|w|"), ("w", r"\sqrt{w^2}"), ("uv", "u+v"),
    ("uv", "uw"),
    (r"\sin t", r"\sin 2t"), ("2+5i", "2-5i"), ("5i", "5"), (r"\sqrt[4]{3}", r"4\sqrt3"),
    (r"\lfloor c/2 \rfloor", r"-\lfloor c/2 \rfloor"),
    ("6", "z^2=6"), ("0", "2z+6=0"), ("z=6", "y=6"), ("x<4", r"x\le4"), ("x<4", "x>4"),
    ("x<4", "4"),
    ("3", r"k\in\{3,8\}"), ("k=3", r"m\in\{3\}"), ("3", r"k\in(3,8)"), ("3,8", r"k\in[3,8]"),
    ("x+y=1", "x+y=2"), ("6", "6=7"), ("7", "6=7"), ("6", "5<z<7"), ("3", "m=3k"),
    ("2,9", "2"), ("2", "2,9"), ("2,9", "2,8"), ("(4,-1)", "(-1,4)"), ("(4,-1)", "(2,-3)"),
    ("(4,-1)", r"\{4,-1\}"), ("(1,2),(5,6)", "(1,6),(5,2)"), ("[1,4)", "(1,4]"), ("[1,4)", "[1,4]"),
    (r"\pm 6", "6"), ("6", r"\pm 6"), (r"2\pm\sqrt5", r"\pm2+\sqrt5"), (r"\emptyset", "0"),
    (r"(-\infty,0)\cup(0,\infty)", r"\mathbb{R}"), ("5:4", "4:5"), ("11:30", "1:30"),
    ("1, 3, \\ldots, n", "1, 2, \\ldots, n"), (r"\infty", r"-\infty"), ("8", r"\infty"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    (r"14\text{ kg}", r"14\text{ g}"), (r"\$7", "€7"), (r"9\text{ cm}^2", r"9\text{ cm}^3"),
    ("45^\\circ", r"45\text{ radians}"), ("210_5", "210_6"), ("101_2", "101_{10}"),
    ("23^\\circ", "23_4"), ("23_4", r"23\text{ cm}"),
    ("25^\\circ C", r"25^\circ\text{F}"), ("3", r"3\text{ is wrong}"), ("3", r"3\text{ or more}"),
    ("3", r"\text{at least }3"), ("3", ">3"), ("3", "3/4"),
    (r"2:45\text{ a.m.}", r"2:45\text{ p.m.}"),
    ("listen", "silent"), (r"\text{tar}", "rat"), ("1", r"\text{True}"), ("1", r"\text{yes}"),
    ("3", r"\text{nan}"), ("3", r"\text{right}"), ("D", "C"), ("D", "C, D"),
    ("D", r"C\text{ or }D"),
    ("3", r"3\text{ or }4"), ("3", "1,2,3,4,5"), ("3", "3+"), ("3", "(3"), ("3", "3)"),
    ("6", "__import__('os').getpid()*0+6"), ("6", "len('abcdef')"), ("25", "2²5"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal(gold: str, answer: str) -> None:
    assert pays(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different(gold: str, answer: str) -> None:
    assert not pays(gold, answer)


def test_a_gold_in_words_may_hold_what_ends_an_answer_elsewhere() -> None:
    for gold in (
        "every set is closed because it is finite",
        r"$k^2$ or, expanded, $k \cdot k$ with k odd",
    ):
        assert verdict(gold, f"The answer is {gold}.").status == "correct"
    assert verdict("5", "The answer is 5 because it is odd.").status == "correct"


@given(st.integers(), st.integers())
def test_integers_are_compared_exactly(a: int, b: int) -> None:
    assert verdict(str(a), f"The answer is {b}.").status == ("correct" if a == b else "wrong")
    assert verdict(str(a), rf"\boxed{{{a:,}}}").status == "correct"


@given(st.integers(-999, 999), st.integers(1, 999))
def test_fractions_equal_what_they_are(a: int, b: int) -> None:
    assert pays(rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{3 * a}}}{{{3 * b}}}")
    assert pays(f"{a}/{b}", rf"-\frac{{{-a}}}{{{b}}}")
    assert not pays(rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{a + b}}}{{{b}}}")


@settings(max_examples=300)
@given(
    st.text(max_size=40),
    st.text(
        alphabet=r"\boxed{}()[]0123456789.,^_!%$|+-*/= \frac\sqrt\text" + "\ud800\x00é½²",
        max_size=60,
    ),
)
def test_no_text_raises_or_is_paid_twice(gold: str, text: str) -> None:
    """Whatever the text: a status that we know, a reward that fits it, and no claim on 0 and 1."""
    known = {"correct", "wrong", "no_answer", "timeout", "error", "bad_gold"}
    for response in (text, "\\boxed{" + text + "}", "The answer is " + text):
        scores = [verdict(g, response) for g in (gold, "0", "1")]
        assert all(s.status in known for s in scores)
        assert all(math.isnan(s.reward) == (s.status == "bad_gold") for s in scores)
        assert not scores[1].reward == scores[2].reward == 1.0


# --- undecided ---------------------------------------------------------------------------------


@pytest.mark.parametrize("gold", [None, "", "  ", "$$", r"\boxed{}", r"\text{}", "?", r"\frac{1}{"])
def test_a_gold_that_cannot_be_read_never_decides(gold: str | None) -> None:
    for response in (r"\boxed{}", r"\boxed{5}", "", f"The answer is {gold}"):
        score = VERIFIER.score_sync(task(gold), response)
        assert score.status == "bad_gold" and not score.decided


def test_no_worker_is_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = MathVerifier(workers=3)  # a pool that no other test shares
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    hard = (task(r"\sqrt{50}"), r"\boxed{5\sqrt{2}}")
    assert verifier.score_sync(*hard).status == "unavailable"
    assert math.isnan(asyncio.run(verifier.score(*hard)).reward)
    assert verifier.score_sync(task("5"), r"\boxed{5.0}").status == "correct"  # needs no worker


@pytest.mark.parametrize(("arguments"), [{"timeout_s": 0}, {"workers": 0}, {"timeout_s": math.nan}])
def test_wrong_settings(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        MathVerifier(**arguments)  # type: ignore[arg-type]


# --- hostile -----------------------------------------------------------------------------------

HOSTILE = [
    r"\boxed{8^{8^{8^{8}}}}", r"\boxed{200000000!}", r"\boxed{(((9!)!)!)!}",
    "The answer is 8**8**8**8",
    r"\boxed{\sum_{k=1}^{10^{12}} \frac{1}{k}}", r"\boxed{\prod_{k=1}^{10^8} k}",
    r"\boxed{\int_0^\infty \frac{\sin(x^2) e^{-x}}{\ln(2+x^9)}\,dx}",
    r"\boxed{\int_0^1 \sum_{k=1}^{9999} \sin(k x)\,dx}", r"\boxed{e^{e^{e^{e^{e}}}}}",
    r"\boxed{\sqrt{2}^{\sqrt{3}^{10^{9}}}}", r"\boxed{\binom{10^9}{5\cdot10^8}}",
    r"\boxed{" + "(" * 4000 + ")" * 4000 + "}",
    r"\boxed{" + r"\sqrt{" * 900 + "2" + "}" * 900 + "}",
    r"\boxed{" * 20000, "\\boxed{" + "9" * 300_000 + "}", "\\boxed{" + "5," * 8000 + "5}",
    "The answer is" + " " * 200_000 + "8", "answer to " * 30_000, "$" * 100_000, "\\" * 100_001,
    r"\boxed{\ud800}", "\\boxed{\ud8006}", "\\boxed{6\x00}",
    "\\boxed{__import__('time').sleep(9)+\\pi}",
    r"\boxed{\sin(\sin(\sin(10^{10^{10}})))}", "\\boxed{" + "x^" * 300 + "x}",
    "\\boxed{" + "-" * 3001 + "6}",
    "\\boxed{" + "|" * 3000 + "}", r"\boxed{(a+b+c+d+e+f)^{400}}",
    "\\boxed{" + "+".join(f"x_{i}" for i in range(300)) + "}",
    "\\boxed{" + r"\pm 1" * 400 + "}", "\\boxed{" + "_{" * 500 + "}",
    "`" * 100_000 + "</think>" * 50_000,
    r"\boxed{5}" * 400_000, "\\\\" * 2_000_000 + r"\boxed{5}",
]  # fmt: skip


@pytest.mark.parametrize("gold", ["6", r"\sqrt{7}", "a^{40}"])
def test_nothing_hangs(gold: str) -> None:
    pays(r"\sqrt{50}", r"5\sqrt2")  # a worker stands
    for response in HOSTILE:
        started = time.monotonic()
        score = verdict(gold, response)
        assert time.monotonic() - started < 2.0, ascii(response[:60])
        assert score.reward == 0.0, (ascii(response[:60]), score)


def test_ten_megabytes() -> None:
    started = time.monotonic()
    assert verdict("6", "step by step. " * 750_000 + r"\boxed{6}").status == "correct"
    assert time.monotonic() - started < 4.0


def test_a_slow_comparison_times_out_as_the_responses_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stuck(self: worker.WorkerPool, message: object, timeout_s: float) -> dict[str, object]:
        raise worker.WorkerTimeout("no answer before the deadline")

    monkeypatch.setattr(worker.WorkerPool, "call", stuck)
    assert verdict(r"\sqrt{50}", r"\boxed{5\sqrt{2}}") == Score(
        0.0, "timeout", "no answer before the deadline"
    )


# --- callers -----------------------------------------------------------------------------------

HARD = [(rf"\sqrt{{{n * n * 2}}}", rf"\boxed{{{n}\sqrt{{2}}}}") for n in range(2, 40)]


def test_it_is_a_verifier_and_pickles() -> None:
    copy = pickle.loads(pickle.dumps(VERIFIER))
    assert isinstance(copy, Verifier) and copy.timeout_s == 1.5 and copy.workers == 1
    assert copy.score_sync(task("4"), "#### 4").reward == 1.0


def test_asyncio_concurrently_and_in_two_loops() -> None:
    async def all_of_them() -> list[Score]:
        return await asyncio.gather(*(VERIFIER.score(task(g), r) for g, r in HARD))

    for _ in range(2):
        assert {score.status for score in asyncio.run(all_of_them())} == {"correct"}


def test_threads() -> None:
    found: list[float] = []
    threads = [
        threading.Thread(target=lambda: found.extend(verdict(g, r).reward for g, r in HARD))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1.0] * (3 * len(HARD))


def test_a_batch_keeps_its_order() -> None:
    pairs = [(task(g), r) for g, r in HARD] + [
        (task("3"), "#### 4"),
        (task(""), "x"),
        (task("3"), "3"),
    ]
    statuses = [score.status for score in VERIFIER.score_batch(pairs)]
    assert statuses == ["correct"] * len(HARD) + ["wrong", "bad_gold", "no_answer"]


def _child(queue: multiprocessing.SimpleQueue[str]) -> None:
    queue.put(verdict(*HARD[0]).status)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_daemonic_forked_child() -> None:
    assert verdict(*HARD[0]).status == "correct"
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    child = context.Process(target=_child, args=(queue,), daemon=True)
    child.start()
    assert queue.get() == "correct"
    child.join()
    assert verdict(*HARD[1]).status == "correct"


def test_importing_it_is_light() -> None:
    code = (
        f"import sys; sys.path[:] = {json.dumps(sys.path)}\n"
        "import mintrl_env.verifiers.math_answer as m\n"
        "s = m.MathVerifier().score_sync(m.Task('t', '', '1/2'), '#### 0.5')\n"
        "assert s.reward == 1.0\n"
        "print(sorted({'sympy', 'math_verify', 'mpmath', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- the corpora -------------------------------------------------------------------------------


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"the corpus {name} is not there: no ../shared beside the repository")
    return path


def test_the_corpus_of_answer_cases() -> None:
    lines = shared("cases/math_verify.jsonl").read_text().rstrip("\n").split("\n")
    rows = [json.loads(line) for line in lines]
    right = scored = 0
    false_positives: list[str] = []
    failed: list[str] = []
    pays(r"\sqrt{50}", r"5\sqrt2")
    for row in rows:
        started = time.monotonic()
        paid = verdict(row["gold"], row["response"]).reward == 1.0
        slow = time.monotonic() - started > 2.0
        if row["lenient"]:
            continue
        scored += 1
        right += paid == row["expected"]
        if paid and not row["expected"]:
            false_positives.append(row["id"])
        if row["hostile"] and (slow or paid != row["expected"]):
            failed.append(row["id"])
    assert failed == []
    assert len(false_positives) <= 2, false_positives
    assert right / scored >= 0.97

"""Which text of a response is its program."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mintrl_env.verifiers.code_extract import extract

FENCE = "```"


@pytest.mark.parametrize(
    ("response", "code"),
    [
        # the last python block
        ("```python\na = 1\n```\n", "a = 1\n"),
        ("one\n```python\na = 1\n```\ntwo\n```python\na = 2\n```\n", "a = 2\n"),
        ("```py\na = 1\n```", "a = 1\n"),
        ("```python3\na = 1\n```", "a = 1\n"),
        ("```Python\na = 1\n```", "a = 1\n"),
        ("``` python\na = 1\n```", "a = 1\n"),
        ("```python title=main.py\na = 1\n```", "a = 1\n"),
        ("```python:main.py\na = 1\n```", "a = 1\n"),
        ("```{.python}\na = 1\n```", "a = 1\n"),
        ("````python\na = 1\n````", "a = 1\n"),
        ("````python\na = 1\n```\nb = 2\n````", "a = 1\n```\nb = 2\n"),
        ("```python\na = 1\n`````", "a = 1\n"),
        ("```python\na = 1\n```   \n```\nb = 2\n```", "a = 1\n"),
        # empty ones do not count
        ("```python\na = 1\n```\n```python\n \n```\n", "a = 1\n"),
        ("```python\n```\n```\nb = 2\n```", "b = 2\n"),
        # untagged ones only where no python one is
        ("```\na = 1\n```", "a = 1\n"),
        ("```\na = 1\n```\n```\nb = 2\n```", "b = 2\n"),
        ("```\na = 1\n```\n```cpp\nint a;\n```", "a = 1\n"),
        ("```python\na = 1\n```\nwhich prints\n```\n1\n```", "a = 1\n"),
        ("```python\na = 1\n```\n```text\n1\n```\n```bash\npython a.py\n```", "a = 1\n"),
        # no closing fence
        ("```python\na = 1\nb = 2", "a = 1\nb = 2"),
        ("```python\na = 1\n\n```python\na = 2\n```", "a = 2\n"),
        ("```python\na = 1\n```\nand\n```python\na = 2", "a = 2"),
        # a closing fence with words behind it
        ("```python\na = 1\n``` That is all.\n\nBye", "a = 1\n"),
        # line ends
        ("```python\r\na = 1\r\nb = 2\r\n```\r\n", "a = 1\nb = 2\n"),
        ("so:\r\n```\r\na = 1\r\n```", "a = 1\n"),
        ("\ufeff```python\na = 1\n```", "a = 1\n"),
        ("```python\n\ufeffa = 1\n```", "a = 1\n"),
        # only at the start of a line, and not within a line of code
        ("see ```python\nno\n```\na = 1\n```", "a = 1\n"),
        ("```python print(1)```\n```python\na = 1\n```", "a = 1\n"),
        ('```python\ns = """\n  ```\n"""\n```', 's = """\n  ```\n"""\n'),
    ],
)
def test_what_is_found(response: str, code: str) -> None:
    assert extract(response).code == code


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("<think>\n```python\nbad\n```\n</think>\n```python\ngood\n```", "good\n"),
        ("<think>```python\nbad\n</think>\n```python\ngood\n```", "good\n"),
        ("```python\ngood\n```\n<think>\n```python\nbad\n```\n</think>", "good\n"),
        ("a <think>b</think> c\n```python\ngood\n```", "good\n"),
        ("<think>one</think>\n<think>\n```py\nbad\n```\n</think>```python\ngood\n```", "good\n"),
        ("<think>\n```python\nbad\n```</think>\n```python\ngood\n```", "good\n"),
        # the prompt ended with the tag
        ("I try\n```python\nbad\n```\n</think>\n\n```\ngood\n```", "good\n"),
        ("I try\n```python\nbad\n</think>\n\n```\ngood\n```", "good\n"),
        ("I try</think>```python\ngood\n```", "good\n"),
        # prose and programs that speak of the tags
        ("The <think> tag is cut.\n```python\ngood\n```", "good\n"),
        ('```python\ns.split("</think>")\n```', 's.split("</think>")\n'),
        ('```python\ns = "<think>a</think>"\n```', 's = "<think>a</think>"\n'),
        ('<think>x</think>\n```python\ns = "<think>"\n```', 's = "<think>"\n'),
    ],
)
def test_thoughts_do_not_count(response: str, code: str) -> None:
    assert extract(response).code == code


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("", "no block of code"),
        ("The answer is 4.", "no block of code"),
        ("a = 1\nprint(a)\n", "no block of code"),
        ("    ```python\n    a = 1\n    ```", "no block of code"),
        ("~~~python\na = 1\n~~~", "no block of code"),
        ("``python\na = 1\n``", "no block of code"),
        ("```python", "no block of code"),
        ("```python\n\n   \n```", "no block of code"),
        ("```java\nint a;\n```", "only java"),
        ("```python2\na\n```", "only python2"),
        ("```c++\na\n```\n```js\nb\n```", "only js"),
        ("<think>\n```python\na = 1\n```\n</think>\nDone.", "no block of code"),
        ("<think>\nI try\n```python\na = 1\n```\n", "no block of code"),
        ("I try\n```python\na = 1\n```\n</think>\nDone.", "no block of code"),
    ],
)
def test_no_code(response: str, reason: str) -> None:
    found = extract(response)
    assert found.code is None and reason in found.reason


def test_half_characters_are_made_whole() -> None:
    assert extract("```python\na = '\ud83d\ude00\ud800'\n```").code == "a = '😀\ufffd'\n"


def test_linear_in_the_length() -> None:
    # Each took minutes if it were quadratic; the test's own time-out is the bound.
    for piece in (
        "```",
        "```\n",
        "```python\n",
        "<think>",
        "</think>",
        "<think>\n```\n",
        "`",
        "\n",
    ):
        extract(piece * (2_000_000 // len(piece)))


pieces = st.lists(
    st.sampled_from(
        [
            "```",
            "```python\n",
            "```\n",
            "\n",
            "<think>",
            "</think>",
            "x = 1\n",
            "text ",
            "\r\n",
            "`",
        ]
    ),
    max_size=12,
)


@given(pieces)
def test_any_mixture_gives_code_without_fences_or_none(parts: list[str]) -> None:
    code = extract("".join(parts)).code
    assert code is None or code.strip()


lines = st.text(st.characters(exclude_characters="`\r", exclude_categories=["Cs"]), max_size=60)


@given(lines.filter(str.strip), lines, st.sampled_from(["python", "py", "python3"]))
def test_a_fenced_program_is_found_as_it_is(code: str, prose: str, tag: str) -> None:
    prose = prose.replace("<", "(")
    response = f"{prose}\n```{tag}\n{code}\n```\n{prose}"
    assert extract(response).code == code + "\n"
    assert extract(response.replace("\n", "\r\n")).code == code + "\n"

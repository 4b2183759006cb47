"""What the sandbox is given: the response's program with what a form of tests needs around it."""

from __future__ import annotations

import re
from dataclasses import replace

from mintrl_env.verifiers.code_compare import How
from mintrl_env.verifiers.code_forms import AssertTests, CallTests, Tests, candidate
from mintrl_env.verifiers.sandbox import Call

ENTRY = "_mintrl_entry_"
"""The name by which the snippets of an assert test find the function under test."""
_GIVEN = "_mintrl_given_"
"""Answers whether the function under test returned anything, be it such that it can be read or not
(a match object); a returned bool is answered as it is."""
_SOLUTION = re.compile(r"^class\s+Solution\b", re.MULTILINE)


def module_of(tests: Tests, code: str) -> str:
    """The program with all that the tests need in it: what the sandbox is given."""
    code = with_setup(tests.setup, code)
    function = None
    if isinstance(tests, CallTests):
        function = tests.calls[0].function
    elif isinstance(tests, AssertTests):
        function = tests.function
    if function is not None and "." not in function and _SOLUTION.search(code):
        # Asked for by its bare name, written as a method. What else has that name may be one of
        # those that stand ready without an import (`product`, `count`).
        code += (
            f"\nif (hasattr(Solution, {function!r}) and __name__ !=\n"
            f"        getattr(globals().get({function!r}), '__module__', None)):\n"
            f"    def {function}(*args, **kwargs):\n"
            f"        return Solution().{function}(*args, **kwargs)\n"
        )
    if isinstance(tests, AssertTests) and _entry_of(tests):
        code += f"\n{ENTRY} = {function}\n"
    if isinstance(tests, CallTests) and tests.rule.how is How.NOT_NONE:
        code += (
            f"\ndef {_GIVEN}(*args, **kwargs):\n"
            f"    value = {candidate(tests.calls[0].function)}(*args, **kwargs)\n"
            f"    return value if type(value) is bool else value is not None\n"
        )
    return code


def calls_of(tests: CallTests) -> tuple[Call, ...]:
    """The calls to make in the module."""
    if tests.rule.how is How.NOT_NONE:
        return tuple(replace(call, function=_GIVEN) for call in tests.calls)
    return tests.calls


def prelude_of(tests: AssertTests) -> str:
    """A snippet that comes before the others, or "".

    The function under test is taken from the program by a name of ours: neither a built-in nor a
    name of the setup may stand in for it. Nor may the program stand in for what the setup imports.
    """
    lines = [tests.setup] if tests.setup.strip() else []
    lines += tests.imports
    if _entry_of(tests):
        lines.append(f"{tests.function} = {ENTRY}")
    return "\n".join(lines)


def _entry_of(tests: AssertTests) -> bool:
    return tests.function is not None and "." not in tests.function


_FUTURE = re.compile(r"from\s+__future__\s+import\s+(?:\([^)]*\)|[^\n;(]*)[^\n]*(?:\n|\Z)")
_FILLER = re.compile(
    r"""[ \t\f]*(?:\#[^\n]*)?\n"""
    r"""|[rRuU]?(?:\"\"\"(?:[^\\]|\\.)*?\"\"\"|'''(?:[^\\]|\\.)*?'''"""
    r"""|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')[ \t]*;?[ \t]*(?:\#[^\n]*)?(?:\n|\Z)""",
    re.DOTALL,
)


def with_setup(setup: str, code: str) -> str:
    """A text before a program, but behind its `from __future__` imports, which must come first."""
    if not setup.strip():
        return code
    at = end = 0
    while True:
        if match := _FUTURE.match(code, at):
            at = end = match.end()
        elif (match := _FILLER.match(code, at)) and match.end() > at:
            at = match.end()
        else:
            break
    head = code[:end] if not end or code[:end].endswith("\n") else code[:end] + "\n"
    return f"{head}{setup}\n{code[end:]}"

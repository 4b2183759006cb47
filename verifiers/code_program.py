"""What the sandbox is given: the response's program with what a form of tests needs around it."""

from __future__ import annotations

import re

from mintrl_env.verifiers.code_forms import AssertTests, CallTests, Tests

ENTRY = "_mintrl_entry_"
"""The name by which the snippets of an assert test find the function under test."""
_SOLUTION = re.compile(r"^class\s+Solution\b", re.MULTILINE)


def module_of(tests: Tests, code: str) -> str:
    """The program with all that the tests need in it: what the sandbox is given."""
    code = with_setup(tests.setup, code)
    function = None
    if isinstance(tests, CallTests):
        function = tests.calls[0].function
    elif isinstance(tests, AssertTests):
        function = tests.function
    if function is None or "." in function:
        return code
    if _SOLUTION.search(code):
        # Asked for by its bare name, written as a method. What else has that name may be one of
        # those that stand ready without an import (`product`, `count`).
        code += (
            f"\nif (hasattr(Solution, {function!r}) and __name__ !=\n"
            f"        getattr(globals().get({function!r}), '__module__', None)):\n"
            f"    def {function}(*args, **kwargs):\n"
            f"        return Solution().{function}(*args, **kwargs)\n"
        )
    if isinstance(tests, AssertTests):
        code += f"\n{ENTRY} = {function}\n"
    return code


def prelude_of(tests: AssertTests) -> str:
    """A snippet that comes before the others, or "".

    The function under test is taken from the program by a name of ours: neither a built-in nor a
    name of the setup may stand in for it.
    """
    lines = [tests.setup] if tests.setup.strip() else []
    if tests.function is not None and "." not in tests.function:
        lines.append(f"{tests.function} = {ENTRY}")
    return "\n".join(lines)


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

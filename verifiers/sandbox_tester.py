"""Runs trusted assert snippets in a process that never holds the code under test.

The names that a snippet uses and nobody else defines are stubs: what is done to them is sent to the
grader, which has it done by the code's own process. Arguments are copied there and what the code
changed in them is copied back into the very objects of the snippet. What comes back is plain, or
it stands for an object of the code: that one has attributes and methods, but equals nothing, so
that no `__eq__` of the code is ever asked.

Standard library only, and nothing of this package but its siblings, loaded from their files.
"""

from __future__ import annotations

import ast
import builtins
import dis
import gc
import importlib
import itertools
import sys
import types
import typing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from mintrl_env.verifiers import plain_values
    from mintrl_env.verifiers.sandbox_child import Message, Talk, describe
    from mintrl_env.verifiers.sandbox_raised import Exceptions
    from mintrl_env.verifiers.sandbox_stub import Remote, coroutine
else:
    import plain_values
    from sandbox_child import Message, Talk, describe
    from sandbox_raised import Exceptions
    from sandbox_stub import Remote, coroutine

_NAME, _FILE = "tests", "tests.py"
# Only what can be subscripted and not called.
_TYPING = {
    name: getattr(typing, name)
    for name in "Any Callable Dict Iterable Iterator List Mapping Optional Sequence Set Tuple Union".split()
}
_LIBRARIES = frozenset(sys.stdlib_module_names)
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_ITERATOR_LIMIT = 1_000_000


class Gone(BaseException):
    """The code's process ended under a call; not for a snippet's `except Exception`."""


class Link:
    """The way to the code's process, and what a snippet's verdict needs to know of it."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self.remotes: dict[int, Any] = {}
        self.exceptions = Exceptions()
        self.stops = False
        """Whether the snippet speaks of StopIteration."""
        self.raised: BaseException | None = None
        self.flavour = "error"
        self.compared = ""
        self.asked = 0
        self.callbacks: list[Any] = []
        """Functions of the tests that were arguments of the code's."""

    def forget(self) -> None:
        """Before a snippet: what the one before it met."""
        self.raised, self.flavour, self.compared = None, "error", ""

    def ask(self, request: Message) -> Message:
        self.asked += 1
        number = self.asked
        answer = self._exchange(request, number)
        while "callback" in answer:
            answer = self._exchange({"back": self._call_back(answer)}, number)
        return answer

    def _exchange(self, request: Message, number: int) -> Message:
        self.talk.send({"rpc": {**request, "n": number}})
        answer = self.talk.receive()
        if answer is None or "gone" in answer:
            self.remotes.clear()
            raise Gone("" if answer is None else answer["gone"])
        if answer.get("n") != number:
            raise Gone("the code's process sent something that is no answer")
        return answer

    def _call_back(self, call: Message) -> Message:
        """The code calls a function that a test gave to it."""
        decoder = plain_values.Decoder(opaque=self.remote, keep=True)
        try:
            function = self.callbacks[call["callback"]]
            value = function(*decoder.decode(call["args"]), **decoder.decode(call["kwargs"]))
            return {"value": plain_values.Encoder(keep=True, opaque=self.opaque).encode(value)}
        except Exception as error:
            return {"raised": describe(error)}

    def do(self, op: str, target: Remote, /, *args: Any, **kwargs: Any) -> Any:
        """Have one operation done; returns its value or raises what it raised."""
        heap: list[Any] = []
        containers: list[Any] = []
        known: dict[int, int] = {}

        def gather(container: Any) -> int:
            number = known[id(container)] = len(containers)
            containers.append(container)
            return number

        def opaque(thing: Any) -> Any:
            if not _is_own(thing):
                return self.opaque(thing)
            number = known.get(id(thing))
            return {"@": gather(thing) if number is None else number}

        encoder = plain_values.Encoder(keep=True, known=known, gather=gather, opaque=opaque)
        request = {
            "serve": "remote",
            "op": op,
            "target": encoder.encode(target),
            "args": encoder.encode(args),
            "kwargs": encoder.encode(kwargs),
            "heap": heap,
        }
        for container in containers:  # and those that are found in them meanwhile
            if _is_own(container):
                attributes = encoder.contents(vars(container))
                heap.append({"o": [type(container).__name__, attributes]})
            else:
                heap.append(encoder.contents(container))
        answer = self.ask(request)
        if "raised" in answer:
            self.throw(answer["raised"], op == "next")
        if "value" not in answer:
            self.flavour = "error"
            self.raised = TypeError(str(answer.get("unreadable") or answer.get("missing"))[:500])
            raise self.raised
        decoder = plain_values.Decoder(table=containers, opaque=self.remote, keep=True)
        for number, tree in answer["changed"]:
            if _is_own(containers[number]):
                _renew(containers[number], decoder.decode(tree["o"][1]))
            else:
                decoder.fill(containers[number], tree)
        return decoder.decode(answer["value"])

    def throw(self, told: Message, stops: bool) -> typing.NoReturn:
        """Raise what the code raised; `stops`: a StopIteration is an answer."""
        try:
            decode = plain_values.Decoder(keep=True).decode
            error = self.exceptions.made(told, decode, stops or self.stops)
        except Exception:
            error = Exception(str(told["detail"])[:500])
        # The code says this of itself, and it must not say that a snippet held.
        flavour = told.get("flavour")
        self.raised = error
        self.flavour = flavour if flavour in ("memory", "blocked") else "error"
        raise error

    def opaque(self, thing: Any) -> Any:
        """How a thing of the tests that is not plain is named to the code's process."""
        if type(thing) is Remote:
            return {"o": thing._target}
        if isinstance(thing, (type, types.BuiltinFunctionType)):
            module, name = thing.__module__, thing.__name__
            if module in _LIBRARIES and getattr(importlib.import_module(module), name, 0) is thing:
                return {"o": ["library", [module, name]]}
        if isinstance(thing, (types.FunctionType, types.MethodType)):
            self.callbacks.append(thing)
            return {"o": ["callback", len(self.callbacks) - 1]}
        if type(thing) in _VIEWS:
            return plain_values.Encoder(keep=True, opaque=self.opaque).encode(list(thing))
        if hasattr(type(thing), "__next__"):
            items = list(itertools.islice(thing, _ITERATOR_LIMIT))
            return {"o": ["iterator", plain_values.Encoder(keep=True).encode(items)]}
        kind = type(thing).__name__
        raise plain_values.NotPlain(f"a {kind} of the tests cannot be sent to the code")

    def remote(self, body: Any) -> Any:
        """The one stub for an object of the code, so that `is` works; a built-in class is itself."""
        if body[0] == "builtin":
            known = getattr(builtins, str(body[1]), None)
            if type(known) is type:
                return known
            raise plain_values.NotPlain("no built-in class")
        number, kind = int(body[0]), str(body[1])[:80]
        if number not in self.remotes:
            stub = Remote(self, ["object", number], kind)
            self.remotes[number] = coroutine(stub) if kind == "coroutine" else stub
        return self.remotes[number]


class Tests:
    """The namespace that the snippets share."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.names: dict[str, Any] = {"__name__": _NAME, "__builtins__": builtins}
        self.defined: set[str] = set()
        """What snippets themselves assign, define or import by name."""

    def run(self, source: str) -> Message:
        """Run a snippet; says `ok`, `failed` (an assert did not hold) or the flavour of an error."""
        link = self.link
        link.forget()
        link.stops = "StopIteration" in source
        try:
            tree = ast.parse(source, _FILE)
            called = _called(tree)
            for part in _parts(tree):
                stored, loaded = _names(part)
                self.bind(loaded - stored - self.defined, called)
                self.defined |= stored
                exec(part, self.names)
        except Gone as error:
            return {"ran": "error", "detail": str(error)}
        except BaseException as error:
            told = describe(error)
            detail = f"{told['detail']}{_line(error, source)}"
            if error is link.raised:
                return {"ran": link.flavour, "detail": detail}
            if isinstance(error, AssertionError) and not link.compared:
                return {"ran": "failed", "detail": detail}
            if link.compared:
                detail += f"; the code returned an object of its class {link.compared}"
            return {"ran": told["flavour"] if told["flavour"] == "memory" else "error",
                    "detail": detail}  # fmt: skip
        return {"ran": "ok", "detail": ""}

    def bind(self, wanted: set[str], called: set[str]) -> None:
        """Make stubs for the names that the code defines. They come before what `import *` brought:
        a test of a `gcd` that the code defines must not test `math.gcd`. They do not come before
        built-ins nor modules: a test that uses `abs` or `math.isclose` must not ask the code's."""
        wanted = {name for name in wanted if not hasattr(builtins, name)}
        modules = (wanted & _LIBRARIES) - called
        self.names.update((name, importlib.import_module(name)) for name in modules)
        wanted -= modules
        if not wanted:
            return
        answer = self.link.ask({"serve": "kinds", "names": sorted(wanted)})
        kinds = answer.get("kinds", {})
        for name in wanted:
            kind = kinds.get(name, {})
            if "stub" in kind and not (kind["stub"] == "library" and name in self.names):
                self.names[name] = Remote(self.link, ["global", name], "type")
            elif "exception" in kind:
                made = self.link.exceptions.stand_in(kind["exception"], kind["names"])
                self.names[name] = made
            elif "value" in kind:
                self.names[name] = plain_values.Decoder(keep=True).decode(kind["value"])
            elif name in _TYPING and name not in self.names:
                # Names of types test nothing by themselves; functions of the library are never
                # lent to a snippet, lest they stand in for one that the code lacks.
                self.names[name] = _TYPING[name]


_HELD = (BaseException, bytes, dict, float, int, list, set, str, tuple, type)


def _is_own(thing: Any) -> bool:
    """Is it an object of a class that the tests define, with attributes and nothing else?"""
    kind = type(thing)
    if type(kind) is not type or kind.__module__ != _NAME or issubclass(kind, _HELD):
        return False
    return type(getattr(thing, "__dict__", None)) is dict


def _renew(thing: Any, attributes: dict[str, Any]) -> None:
    """Give an object of the tests the attributes that the code left it with; its methods stay."""
    if any(callable(getattr(type(thing), name, None)) for name in attributes):
        raise plain_values.NotPlain("the code put something in the place of a method of the tests")
    vars(thing).clear()
    vars(thing).update(attributes)


def _called(tree: ast.Module) -> set[str]:
    """The names that are called, as against those whose attributes are."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _parts(tree: ast.Module) -> list[types.CodeType]:
    """The snippet, cut after its last top-level `import *`: only then is it known what it brings."""
    cut = 0
    for index, node in enumerate(tree.body):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            cut = index + 1
    pieces = [tree.body[:cut], tree.body[cut:]]
    return [
        compile(ast.Module(piece, []), _FILE, "exec", dont_inherit=True)
        for piece in pieces
        if piece
    ]


def _names(code: types.CodeType) -> tuple[set[str], set[str]]:
    """The global names that a piece of code stores, and those that it uses."""
    stored, loaded = set(), set()
    codes = [code]
    while codes:
        current = codes.pop()
        codes += [thing for thing in current.co_consts if isinstance(thing, types.CodeType)]
        for step in dis.get_instructions(current):
            if step.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
                loaded.add(step.argval)
            elif step.opname == "STORE_GLOBAL" or (step.opname == "STORE_NAME" and current is code):
                stored.add(step.argval)
    return stored, loaded


def _line(error: BaseException, source: str) -> str:
    """The snippet's own line that an exception came through."""
    number, step = 0, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == _FILE:
            number = step.tb_lineno
        step = step.tb_next
    lines = source.splitlines()
    return f" at: {lines[number - 1].strip()[:200]}" if 0 < number <= len(lines) else ""


def run_tester(talk: Talk) -> None:
    """Run the snippets that come, until the grader has gone."""
    sys.setrecursionlimit(10_000)
    gc.disable()  # large values would make it walk over all of them again and again
    tests = Tests(Link(talk))
    while (request := talk.receive()) is not None:
        if "snippet" in request:
            talk.send({"done": tests.run(request["snippet"])})

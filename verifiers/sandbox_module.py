"""A module of untrusted code and the calls in it: what runs in a session's process.

Standard library only, and nothing of this package but its siblings, loaded from their files.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import resource
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from mintrl_env.verifiers import plain_values
    from mintrl_env.verifiers.sandbox_child import (
        FILE,
        Message,
        Talk,
        describe,
        fresh_module,
        names_of,
        nearest_builtin,
    )
else:
    import plain_values
    from sandbox_child import (
        FILE,
        Message,
        Talk,
        describe,
        fresh_module,
        names_of,
        nearest_builtin,
    )

USUAL: dict[str, Any] = {}
"""The built-ins of a session's module, those of Python included; `prepare` fills it. Found behind the
module's own names, they never pass for something that the code defines."""

_STAR = ("typing", "math", "collections", "heapq", "bisect", "itertools", "functools", "operator")
_MODULES = (
    "typing math re sys heapq bisect collections itertools functools string random operator copy "
    "datetime json array io decimal fractions time os"
).split()


class CallableModule(types.ModuleType):
    """`bisect` and `copy` are modules to some programs and functions to others."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[self.__name__](*args, **kwargs)


def usual_names() -> dict[str, Any]:
    """What the code of a call test may use without an import, as LeetCode provides it."""
    names: dict[str, Any] = {}
    for name in _STAR:
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
        names.update((n, getattr(module, n)) for n in public)
    names.update((name, importlib.import_module(name)) for name in _MODULES)
    for name in ("bisect", "copy"):
        both = CallableModule(name)
        both.__dict__.update(vars(names[name]))
        names[name] = both
    names["deepcopy"] = names["copy"].deepcopy
    names["datetime"] = importlib.import_module("datetime")
    return {**names, **vars(builtins)}


class NoCollector:
    """No garbage collection while values are read or written: of many new containers it would make
    a walk over all of them again and again."""

    def __enter__(self) -> None:
        self.was = gc.isenabled()
        gc.disable()

    def __exit__(self, *error: object) -> None:
        if self.was:
            gc.enable()


class Missing(Exception):
    """The code does not define what is asked of it."""


class Ended(BaseException):
    """The other side has gone."""


class Session:
    """The loaded module and the objects that tests hold of it."""

    def __init__(self, talk: Talk, module: types.ModuleType, fresh_kb: int) -> None:
        self.talk, self.module, self.fresh_kb = talk, module, fresh_kb
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.kinds_of_tests: dict[str, type] = {}
        self.asked = 0
        """The number of the request that is being answered."""

    def next_request(self) -> Message:
        """The next request; ends the process where there will be none."""
        message = self.talk.receive()
        if message is None:
            raise Ended
        request: Message = message.get("rpc", message)
        return request

    def answer(self, request: Message) -> None:
        """Do what is asked, and say what came of it."""
        before, self.asked = self.asked, request["n"]
        try:
            serve = {"plain": self.call, "remote": self.remote, "kinds": self.kinds}
            answer = serve[request["serve"]](request)
        except Ended:
            raise
        except plain_values.NotPlain as error:
            answer = {"unreadable": f"the value cannot be read back: {error}"}
        except Missing as error:
            answer = {"missing": str(error)}
        except BaseException as error:
            answer = {"raised": describe(error)}
        answer["n"], self.asked = self.asked, before
        answer["mb"] = (_peak_kb() - self.fresh_kb) / 1024
        self.talk.send(answer)

    def find(self, name: str) -> Any:
        """A global `f`, `Class.method` of a new object, or `f` as a method of `Solution`."""
        first, _, rest = name.partition(".")
        names = self.module.__dict__
        if first not in names:
            solution = names.get("Solution")
            if rest or first == "Solution" or not hasattr(solution, first):
                raise Missing(f"the code defines no {first!r}")
            return getattr(solution(), first)  # type: ignore[misc]
        thing = names[first]
        if rest:
            if not hasattr(thing, rest):
                raise Missing(f"the code's {first!r} has no {rest!r}")
            return getattr(thing(), rest)
        return thing

    def call(self, request: Message) -> Message:
        """One call of a call test: plain values in, a plain value out."""
        decoder = plain_values.Decoder()
        function = self.find(request["function"])
        args = decoder.decode(request["args"])
        kwargs = decoder.decode(request["kwargs"])
        value = function(*args, **kwargs)
        with NoCollector():
            return {"value": plain_values.Encoder().encode(value)}

    # The rest serves assert tests. A container of the arguments is sent as a number in `heap`;
    # the answer holds the new contents of those that the code changed.

    def remote(self, request: Message) -> Message:
        """One operation that a stub of the tester stands for."""
        with NoCollector():
            heap = self._heap(request["heap"])
            decoder = plain_values.Decoder(table=heap, opaque=self._thing, keep=True)
            target = decoder.decode(request["target"])
            args = decoder.decode(request["args"])
            kwargs = decoder.decode(request["kwargs"])
        value = OPERATIONS[request["op"]](target, *args, **kwargs)
        with NoCollector():
            known = {id(container): number for number, container in enumerate(heap)}

            def opaque(thing: Any) -> Any:
                number = known.get(id(thing))
                return self._number(thing) if number is None else {"@": number}

            encoder = plain_values.Encoder(keep=True, known=known, opaque=opaque)
            changed = []
            for number, container in enumerate(heap):
                if type(container) in plain_values.MUTABLE:
                    tree = encoder.contents(container)
                else:
                    [name, _] = request["heap"][number]["o"]
                    tree = {"o": [name, encoder.contents(vars(container))]}
                if tree != request["heap"][number]:
                    changed.append([number, tree])
            return {"value": encoder.encode(value), "changed": changed}

    def _heap(self, trees: list[Any]) -> list[Any]:
        heap: list[Any] = [self._empty(tree) for tree in trees]
        decoder = plain_values.Decoder(table=heap, opaque=self._thing, keep=True)
        for container, tree in zip(heap, trees, strict=True):
            if type(container) in plain_values.MUTABLE:
                decoder.fill(container, tree)
            else:
                vars(container).update(decoder.decode(tree["o"][1]))
        return heap

    def _empty(self, tree: Any) -> Any:
        """A container of the kind that a tree holds, or an object of the tests' class of that name
        as the code has it, to be filled once all of them exist."""
        if type(tree) is list:
            return []
        [(tag, body)] = tree.items()
        if tag == "o":
            kind = self.module.__dict__.get(body[0])
            if not isinstance(kind, type):
                kind = self.kinds_of_tests.setdefault(body[0], type(body[0], (), {}))
            return object.__new__(kind)
        made = plain_values.Decoder(keep=True)
        return made.decode({"x": [body[0], [], body[2]]} if tag == "x" else {tag: type(body)()})

    def _thing(self, body: Any) -> Any:
        """What the tester means by `o`: a global by name, an object by number, a library name."""
        how, what = body
        if how == "global":
            return self.find(what)
        if how == "object":
            if what >= len(self.objects):
                raise Missing("an object of a process that has ended")
            return self.objects[what]
        if how == "callback":
            return self._callback(what)
        if how == "iterator":
            return iter(plain_values.Decoder(keep=True).decode(what))
        module, name = what
        return getattr(importlib.import_module(module), name)

    def _callback(self, number: int) -> Callable[..., Any]:
        """A function of the tests; what it does to its arguments stays there."""

        def call(*args: Any, **kwargs: Any) -> Any:
            encoder = plain_values.Encoder(keep=True, opaque=self._number)
            self.talk.send(
                {
                    "n": self.asked,
                    "callback": number,
                    "args": encoder.encode(args),
                    "kwargs": encoder.encode(kwargs),
                }
            )
            while "back" not in (request := self.next_request()):
                self.answer(request)  # what the function does with objects of the code
            back = request["back"]
            if "raised" in back:
                raise self._exception(back["raised"])
            return plain_values.Decoder(opaque=self._thing, keep=True).decode(back["value"])

        return call

    def _exception(self, told: Message) -> BaseException:
        """What a function of the tests raised: an exception of the code's, or a built-in one."""
        for _, name in told.get("names", ()):
            kind = self.module.__dict__.get(name)
            if isinstance(kind, type) and issubclass(kind, BaseException):
                with contextlib.suppress(Exception):
                    return kind(*plain_values.Decoder(keep=True).decode(told["args"]))
        return getattr(builtins, told["type"])(told["detail"])  # type: ignore[no-any-return]

    def _number(self, thing: Any) -> Any:
        if type(thing) is type:
            name = thing.__name__
            if getattr(builtins, name, None) is thing:
                return {"o": ["builtin", name]}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(thing, numpy.generic):  # a number, to whoever tests it
            with contextlib.suppress(plain_values.NotPlain):
                return plain_values.Encoder(keep=True).encode(thing.item())
        number = self.numbers.get(id(thing))
        if number is None:
            number = self.numbers[id(thing)] = len(self.objects)
            self.objects.append(thing)
        return {"o": [number, str(type(thing).__name__)[:80]]}

    def kinds(self, request: Message) -> Message:
        """What the code makes of some names: absent, a module, something to call, or a value."""
        kinds: dict[str, Any] = {}
        encoder = plain_values.Encoder(keep=True)
        for name in request["names"]:
            try:
                thing = self.find(name)
            except Missing:
                continue
            if isinstance(thing, types.ModuleType):
                kinds[name] = {"module": thing.__name__}
                continue
            if isinstance(thing, type) and issubclass(thing, BaseException):
                builtin = nearest_builtin(thing).__name__
                kinds[name] = {"exception": builtin, "names": names_of(thing)}
                continue
            try:
                kinds[name] = {"value": encoder.encode(thing)}
            except plain_values.NotPlain:
                ours = getattr(thing, "__module__", None) == self.module.__name__
                kinds[name] = {"stub": "code" if ours else "library"}
        return {"kinds": kinds}


def _special(name: str) -> Callable[[Any], Any]:
    return getattr(builtins, name)  # type: ignore[no-any-return]


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, /, *args, **kwargs: target(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "delete": delattr,
    "item": lambda target, key: target[key],
    "set_item": lambda target, key, value: target.__setitem__(key, value),
    "del_item": lambda target, key: target.__delitem__(key),
    **{name: _special(name) for name in ("len", "iter", "next", "str", "repr", "bool", "int")},
    "isinstance": lambda target, thing: isinstance(thing, target),
    "enter": lambda target: type(target).__enter__(target),
    "exit": lambda target, kind: type(target).__exit__(target, kind, None, None) and None,
    "await": lambda target: importlib.import_module("asyncio").run(target),
    "issubclass": lambda target, thing: issubclass(thing, target),
}


def run_session(talk: Talk, code: str) -> None:
    """Load a module, then answer requests until the other side has gone."""
    fresh_kb = _peak_kb()
    module = fresh_module("solution", USUAL)
    try:
        exec(compile(code, FILE, "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        talk.send({"n": 0, "raised": describe(error)})
        return
    talk.send({"n": 0, "loaded": True})
    session = Session(talk, module, fresh_kb)
    with contextlib.suppress(Ended):
        while True:
            session.answer(session.next_request())


def _peak_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

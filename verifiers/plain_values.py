"""Plain built-in values as JSON text, between processes that do not trust each other.

Lists, strings, numbers of up to 63 bits, True, False and None are themselves in JSON; all else is
an object with one key, its tag:

    i  an int of any size, in hexadecimal       t  tuple          d  dict, as [key, value] pairs
    s  a str with surrogates, in hexadecimal    e  set            z  frozenset
    b  bytes, in hexadecimal                    a  bytearray      r  range
    c  complex                                  x  a container of the standard library
    v  a value of the standard library          n  a named tuple: its class, fields and items
    @  the container with this number in a table that both sides hold
    o  whatever the two sides agreed on for what is not plain

Decoding builds nothing but built-in types and refuses, with NotPlain, what is malformed, too deep,
too large, or made to be slow (keys that all have one hash). Nothing of a value's own class is ever
called while encoding: types are compared by identity, and a subclass is not plain.

Standard library only, and nothing of this package but `library_values`, which a sandbox loads from
its file as it does this one.
"""

from __future__ import annotations

import collections
import json
import re
import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from mintrl_env.verifiers import library_values
else:
    import library_values

MAX_DEPTH = 200
MAX_TEXT = 16 << 20
"""Characters of the longest text that `loads` reads."""
MAX_NODES = 2_000_000
"""Values in the largest text that `loads` reads."""
MAX_COLLISIONS = 100
"""How many keys of one dict or set may share a hash."""

Tree = Any
"""What `json.dumps` takes."""

_INT64 = 1 << 63
_SCALARS = frozenset({int, float, bool, type(None)})
MUTABLE = frozenset({list, dict, set, bytearray, *library_values.CONTAINERS})
"""The types that a table of containers may hold."""


class NotPlain(Exception):
    """A value that cannot be sent, or a text that is no value."""


class Encoder:
    """Turns values into trees.

    Args:
        keep: containers, values and named tuples of the standard library keep their class;
            otherwise the containers count as the dict or list that they hold, and the others are
            not plain.
        known: numbers of containers by `id`: these are sent as references.
        gather: called with each container that is not known; enters it there and returns its
            number. Without it such a container is sent whole.
        opaque: called with what is not plain; returns a tree, or raises NotPlain.
    """

    def __init__(
        self,
        *,
        keep: bool = False,
        known: dict[int, int] | None = None,
        gather: Callable[[Any], int] | None = None,
        opaque: Callable[[Any], Tree] | None = None,
    ) -> None:
        self.keep, self.known, self.gather, self.opaque = keep, known, gather, opaque
        self._nodes, self._text = MAX_NODES, MAX_TEXT

    def encode(self, value: Any, depth: int = 0) -> Tree:
        """The tree of a value.

        Raises:
            NotPlain: the value, or one inside it, is not plain, or is nested too deeply; or all
                that this encoder has encoded is too large to be read.
        """
        kind = type(value)
        if kind in _SCALARS and kind is not int:
            return value
        if kind is int:
            if -_INT64 <= value < _INT64:
                return value
            self._spend(0, value.bit_length() // 4)
            return {"i": hex(value)}
        if kind is str:
            self._spend(0, len(value))
            return value if _no_surrogates(value) else {"s": value.encode("utf-8", _PASS).hex()}
        if kind in MUTABLE:
            if self.known is not None and (number := self.known.get(id(value))) is not None:
                return {"@": number}
            if self.gather is not None:
                return {"@": self.gather(value)}
            return self.contents(value, depth)
        if depth > MAX_DEPTH:
            raise NotPlain(f"nested more than {MAX_DEPTH} deep")
        if kind is tuple:
            return {"t": self._items(value, depth)}
        if kind is frozenset:
            return {"z": self._items(value, depth)}
        if kind is bytes:
            self._spend(0, 2 * len(value))
            return {"b": value.hex()}
        if kind is range:
            parts = (value.start, value.stop, value.step)
            return {"r": [self.encode(part, depth + 1) for part in parts]}
        if kind is complex:
            return {"c": [value.real, value.imag]}
        if self.keep and kind in library_values.NAMES:
            return self._value(value, library_values.NAMES[kind], depth)
        if self.keep and kind.__bases__ == (tuple,) and "_fields" in kind.__dict__:
            return self._named(tuple.__getitem__(value, slice(None)), kind, depth)
        if self.opaque is not None:
            return self.opaque(value)
        raise NotPlain(f"an object of class {_name(kind)} is not plain")

    def contents(self, value: Any, depth: int = 0) -> Tree:
        """The tree of a list, dict, set or the like, even of one that is known."""
        if depth > MAX_DEPTH:
            raise NotPlain(f"nested more than {MAX_DEPTH} deep")
        kind = type(value)
        if kind is list:
            return self._items(value, depth)
        if kind is dict:
            return {"d": self._pairs(value, depth)}
        if kind is set:
            return {"e": self._items(value, depth)}
        if kind is bytearray:
            self._spend(0, 2 * len(value))
            return {"a": value.hex()}
        if kind is collections.deque:
            tree: Tree = self._items(list(value), depth)
        else:
            tree = self._pairs(value, depth)
        if not self.keep:
            return tree if kind is collections.deque else {"d": tree}
        return {"x": [library_values.CONTAINERS[kind], tree, library_values.more_of(value)]}

    def _value(self, value: Any, name: str, depth: int) -> Tree:
        parts = library_values.parts(value, name)
        self._spend(len(parts), 0)
        return {"v": [name, *(self.encode(part, depth + 1) for part in parts)]}

    def _named(self, items: tuple[Any, ...], kind: type, depth: int) -> Tree:
        trees, name = self._items(items, depth), _name(kind)
        fields = library_values.fields_of(kind, name, len(items))
        if fields is None:
            return {"t": trees}
        self._spend(len(fields), sum(map(len, fields)))
        return {"n": [name, list(fields), trees]}

    def _spend(self, nodes: int, text: int) -> None:
        self._nodes -= nodes
        self._text -= text
        if self._nodes < 0 or self._text < 0:
            raise NotPlain(f"more than {MAX_NODES} values or {MAX_TEXT} characters")

    def _items(self, values: Collection[Any], depth: int) -> list[Tree]:
        self._spend(len(values), 0)
        if type(values) is list:  # the common case, at the speed of C
            kinds = set(map(type, values))
            if kinds == {int}:
                if min(values) >= -_INT64 and max(values) < _INT64:
                    return values
            elif kinds == {str}:
                self._spend(0, sum(map(len, values)))
                if _no_surrogates("".join(values)):
                    return values
            elif kinds <= _SCALARS and int not in kinds:
                return values
        trees = []
        whole = self.gather is None and depth < MAX_DEPTH
        known = self.known or ()
        for value in values:
            if whole and type(value) is list and id(value) not in known:
                trees.append(self._items(value, depth + 1))  # as `encode` does, in fewer steps
            else:
                trees.append(self.encode(value, depth + 1))
        return trees

    def _pairs(self, mapping: dict[Any, Any], depth: int) -> list[Tree]:
        self._spend(2 * len(mapping), 0)
        pairs = []
        for key, value in type(mapping).items(mapping):  # an OrderedDict has an order of its own
            pairs.append([self.encode(key, depth + 1), self.encode(value, depth + 1)])
        return pairs


class Decoder:
    """Turns trees into values.

    Args:
        table: the containers that references name; None: references are refused.
        opaque: called with what stands under the tag `o`; None: refused.
        keep: what an encoder kept of the standard library is made again; otherwise it is refused.
    """

    def __init__(
        self,
        *,
        table: list[Any] | None = None,
        opaque: Callable[[Tree], Any] | None = None,
        keep: bool = False,
    ) -> None:
        self.table, self.opaque, self.keep = table, opaque, keep

    def decode(self, tree: Tree, depth: int = 0) -> Any:
        """The value of a tree that came out of `json.loads`.

        Raises:
            NotPlain: the tree is not one that `encode` makes.
        """
        kind = type(tree)
        if kind in _SCALARS or kind is str:
            return tree
        if depth > MAX_DEPTH:
            raise NotPlain(f"nested more than {MAX_DEPTH} deep")
        if kind is list:
            return self._items(tree, depth)
        if kind is not dict or len(tree) != 1:
            raise NotPlain("neither a JSON value nor an object with one tag")
        [(tag, body)] = tree.items()
        try:
            return self._tagged(tag, body, depth)
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise NotPlain(f"a malformed value under the tag {tag!r}: {error}") from None

    def fill(self, container: Any, tree: Tree) -> None:
        """Give a list, dict, set or the like the contents that a tree holds, in place."""
        new = self.decode(tree)
        if isinstance(container, (list, bytearray)):
            container[:] = new
        elif isinstance(container, (dict, set)):
            container.clear()
            dict.update(container, new) if isinstance(container, dict) else container.update(new)
        elif isinstance(container, collections.deque):
            container.clear()
            container.extend(new)
        else:
            raise NotPlain(f"{type(container).__name__} cannot be filled")

    def _tagged(self, tag: str, body: Tree, depth: int) -> Any:
        if tag == "t":
            return tuple(self._items(_a_list(body), depth))
        if tag == "d":
            return self._dict(body, depth)
        if tag in ("e", "z"):
            items = self._items(_a_list(body), depth)
            _refuse_collisions(items)
            return set(items) if tag == "e" else frozenset(items)
        if tag == "i":
            return int(_a_str(body), 16)
        if tag == "s":
            return bytes.fromhex(_a_str(body)).decode("utf-8", _PASS)
        if tag == "b":
            return bytes.fromhex(_a_str(body))
        if tag == "a":
            return bytearray.fromhex(_a_str(body))
        if tag == "c":
            real, imag = _a_list(body)
            return complex(float(real), float(imag))
        if tag == "r":
            start, stop, step = (self.decode(part, depth + 1) for part in _a_list(body))
            return range(start, stop, step)
        if tag == "x" and self.keep:
            return self._standard(*_a_list(body), depth=depth)
        if tag == "v" and self.keep:
            name, *parts = _a_list(body)
            return library_values.build(_a_str(name), [self.decode(p, depth + 1) for p in parts])
        if tag == "n" and self.keep:
            name, fields, items = _a_list(body)
            kind = library_values.named_tuple(_a_str(name), tuple(_a_list(fields)))
            return kind._make(self._items(_a_list(items), depth))
        if tag == "@" and self.table is not None and type(body) is int and body >= 0:
            return self.table[body]
        if tag == "o" and self.opaque is not None:
            return self.opaque(body)
        raise NotPlain(f"the tag {tag!r} is unknown here")

    def _items(self, trees: list[Tree], depth: int) -> list[Any]:
        kinds = set(map(type, trees))
        if not kinds & {list, dict}:
            return trees
        values = []
        for tree in trees:
            values.append(self.decode(tree, depth + 1))
        return values

    def _dict(self, body: Tree, depth: int) -> dict[Any, Any]:
        keys, values = [], []
        for key, value in _a_list(body):
            keys.append(self.decode(key, depth + 1))
            values.append(self.decode(value, depth + 1))
        _refuse_collisions(keys)
        return dict(zip(keys, values, strict=True))

    def _standard(self, name: str, body: Tree, more: Any, *, depth: int) -> Any:
        if name == "deque":
            return library_values.container(name, self._items(_a_list(body), depth), more)
        return library_values.container(name, self._dict(body, depth), more)


def dumps(value: Any) -> str:
    """A plain value as ASCII text, containers of the standard library as dict or list.

    Raises:
        NotPlain: it is not plain, or nested too deeply.
    """
    return to_text(Encoder().encode(value))


def loads(text: str | bytes) -> Any:
    """The value of a text from `dumps`.

    Raises:
        NotPlain: it is malformed, too deep or too large.
    """
    return Decoder().decode(from_text(text))


def to_text(tree: Tree) -> str:
    """JSON in ASCII; what Python calls NaN and Infinity included."""
    try:
        return json.dumps(tree, ensure_ascii=True, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError) as error:
        raise NotPlain(f"cannot be written as JSON: {error}") from None


def from_text(text: str | bytes) -> Tree:
    """The tree in a JSON text that anybody may have written; its size is bounded first.

    Raises:
        NotPlain: it is not JSON, too deep or too large.
    """
    if len(text) > MAX_TEXT:
        raise NotPlain(f"{len(text)} characters, over the limit of {MAX_TEXT}")
    comma, bracket, brace = (",", "[", "{") if isinstance(text, str) else (b",", b"[", b"{")
    nodes = text.count(comma) + text.count(bracket) + text.count(brace)  # type: ignore[arg-type]
    if nodes > MAX_NODES:
        raise NotPlain(f"more than {MAX_NODES} values")
    # A long run of digits takes quadratic time where the interpreter's own limit was lifted.
    bounded = 0 < sys.get_int_max_str_digits() <= 10_000
    try:
        if isinstance(text, bytes):
            text = text.decode("ascii")
        return json.loads(text) if bounded else json.loads(text, parse_int=_short_int)
    except (ValueError, RecursionError) as error:
        raise NotPlain(f"not JSON: {str(error)[:200]}") from None


_PASS = "surrogatepass"
_SURROGATE = re.compile("[\ud800-\udfff]")


def _no_surrogates(text: str) -> bool:
    return text.isascii() or _SURROGATE.search(text) is None


def _name(kind: type) -> str:
    name = type.__dict__["__name__"].__get__(kind)  # whatever a metaclass says
    return str(name)[:80]


def _short_int(digits: str) -> int:
    if len(digits) > 40:
        raise ValueError("an int of more than 40 digits")
    return int(digits)


def _a_list(body: Tree) -> list[Tree]:
    if type(body) is not list:
        raise ValueError("not a list")
    return body


def _a_str(body: Tree) -> str:
    if type(body) is not str:
        raise ValueError("not a str")
    return body


def _refuse_collisions(keys: list[Any]) -> None:
    if len(keys) <= MAX_COLLISIONS:
        return
    hashes = sorted(map(hash, keys))
    for first, later in zip(hashes, hashes[MAX_COLLISIONS:], strict=False):
        if first == later:
            raise NotPlain(f"more than {MAX_COLLISIONS} keys with the same hash")

"""Reads the data in a pickle without running it: containers, numbers, texts and tensors; all else is set aside.

A pickle is a program. This reader walks through its instructions and builds plain containers only. It imports nothing
and calls nothing by a name that the file gives. The few names it knows (`KNOWN`, and those that the caller adds) are
answered by functions of this package. An object of another package becomes a `SetAside`, which keeps its name and what
the file says about it. A call of a function, or of anything in Python's own library, is refused: data has no use for
it, and attacks are made of it.
"""

from __future__ import annotations

import pickletools
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from convergeflow.errors import UserError

Make = Callable[..., Any]


@dataclass(eq=False)
class SetAside:
    """An object of a foreign class: never made, only described."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    elements: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Name:
    """A name in the file, as `module.attribute`; nothing is imported for it."""

    module: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


class Refused(UserError):
    """The pickle is broken, or asks for something to be run."""


def _text_bytes(text: str, encoding: str) -> bytes:
    if not isinstance(encoding, str) or encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise Refused("it encodes a text in an unknown way")
    return text.encode(encoding)


def _keys(values: Any) -> Any:
    """Refuse keys that are not plain: a few bytes can describe tuples in tuples whose hash takes years."""
    for value in values:
        if not isinstance(value, _PLAIN) and not (
            isinstance(value, tuple) and all(isinstance(part, _PLAIN) for part in value)
        ):
            raise Refused(f"its pickle has a {type(value).__name__} as a key")
    return values


_PLAIN = (str, bytes, int, float, complex, bool, type(None), Name, SetAside)


def _dictionary(items: Any = (), *_: Any) -> dict[Any, Any]:
    pairs = list(items.items() if isinstance(items, dict) else items)
    return dict(zip(_keys([key for key, _ in pairs]), [value for _, value in pairs], strict=True))


def _default_dictionary(*_: Any) -> dict[Any, Any]:
    return {}


KNOWN: dict[str, Make] = {
    "collections.OrderedDict": _dictionary,
    "collections.defaultdict": _default_dictionary,
    "_codecs.encode": _text_bytes,
    "builtins.dict": _dictionary,
    "builtins.list": lambda items=(): list(items),
    "builtins.tuple": lambda items=(): tuple(items),
    "builtins.set": lambda items=(): set(_keys(items)),
    "builtins.frozenset": lambda items=(): frozenset(_keys(items)),
    "builtins.int": lambda value=0: int(value),
    "builtins.float": lambda value=0.0: float(value),
    "builtins.bool": lambda value=False: bool(value),
    "builtins.complex": lambda *parts: complex(*parts),
    "builtins.bytearray": lambda *parts: _text_bytes(*parts) if parts else b"",
}
"""Names whose calls are answered, each by a function of ours."""

HARMLESS = {
    "argparse.Namespace",
    "builtins.object",
    "collections.Counter",
    "collections.deque",
    "copyreg._reconstructor",
    "datetime.date",
    "datetime.datetime",
    "datetime.timedelta",
    "datetime.timezone",
    "decimal.Decimal",
    "enum.Enum",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "types.SimpleNamespace",
    "typing.Any",
    "uuid.UUID",
}
"""What is data although it is of Python's own library or called as a function; set aside like foreign classes."""


def read(data: bytes, known: Mapping[str, Make], stored: Callable[[Any], Any]) -> tuple[Any, set[str]]:
    """The value of a pickle and the names that were set aside; `stored` answers torch's references to storages."""
    reader = _Reader({**KNOWN, **known}, stored)
    try:
        value = reader.run(data)
    except Refused:
        raise
    # A broken program fails in many ways: an empty stack, a value of the wrong kind, a text that ends too soon.
    except Exception as failure:
        raise Refused(f"its pickle is broken ({type(failure).__name__})") from None
    return value, reader.aside


_MARK = object()
_SIZED = (str, bytes, list, tuple, dict, set, frozenset)


class _Reader:
    """A stack, a memo, and one method per kind of instruction."""

    def __init__(self, known: Mapping[str, Make], stored: Callable[[Any], Any]) -> None:
        self.known, self.stored = known, stored
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.aside: set[str] = set()
        self.copies = 0
        """How many more values may be copied from one container into another."""

    def run(self, data: bytes) -> Any:
        self.copies = len(data)  # every value takes a byte at least, and is copied once at most
        for code, argument, _ in pickletools.genops(data):
            name = code.name
            if name == "STOP":
                value = self.stack.pop()
                if self.stack:
                    raise Refused("its pickle leaves values behind")
                return value
            if name in _PUSHED:
                self.stack.append(argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name]())
            elif name in _STEPS:
                _STEPS[name](self, argument)
            elif name not in _IGNORED:
                raise Refused(f"its pickle uses the instruction {name}")
        raise Refused("its pickle has no end")

    # -- what instructions do ------------------------------------------------------------------------------------------

    def marked(self) -> list[Any]:
        """Everything since the last mark."""
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise Refused("its pickle lacks a mark")
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def name(self, module: str, attribute: str) -> Name:
        # torch still writes the protocol of Python 2, where much had other names: subprocess was `commands`.
        if (module, attribute) in NAME_MAPPING:
            module, attribute = NAME_MAPPING[module, attribute]
        return Name(IMPORT_MAPPING.get(module, module), attribute)

    def call(self, what: Any, arguments: Any) -> Any:
        if not isinstance(what, Name) or not isinstance(arguments, tuple):
            raise Refused("its pickle calls something that is no name")
        make = self.known.get(str(what))
        if make is not None:
            self.copies -= sum(len(each) for each in arguments if isinstance(each, _SIZED))
            if self.copies < 0:
                raise Refused("its pickle copies containers without end")
            return make(*arguments)
        self.check(what)
        self.aside.add(str(what))
        return SetAside(str(what), arguments)

    def check(self, what: Name) -> None:
        """Refuse to set aside what only an attack would call."""
        top = what.module.split(".")[0]
        owned = top in sys.stdlib_module_names or top in ("nt", "posix") or (top.startswith("_") and top != "__main__")
        last = what.attribute.rsplit(".", 1)[-1].lstrip("_")
        is_function = not last[:1].isupper()
        if str(what) not in HARMLESS and (owned or is_function):
            raise Refused(f"it calls {what}, and reading that would run code")

    def build(self, _: Any) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, SetAside):
            target.state = state
        elif isinstance(target, dict) and (state is None or isinstance(state, (dict, tuple))):
            pass  # what torch notes about a state_dict (its `_metadata`) is no weight
        elif not hasattr(type(target), "__torch_function__"):
            raise Refused(f"its pickle gives a state to a {type(target).__name__}")

    def add_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        items = target.items if isinstance(target, SetAside) else target
        if not isinstance(items, dict):
            raise Refused(f"its pickle puts keys into a {type(target).__name__}")
        items.update(zip(_keys(pairs[::2]), pairs[1::2], strict=True))

    def add_elements(self, values: list[Any]) -> None:
        target = self.stack[-1]
        elements = target.elements if isinstance(target, SetAside) else target
        if isinstance(elements, set):
            elements.update(_keys(values))
        elif isinstance(elements, list):
            elements.extend(values)
        else:
            raise Refused(f"its pickle puts elements into a {type(target).__name__}")

    def global_(self, argument: str) -> None:
        module, _, attribute = argument.partition(" ")
        self.stack.append(self.name(module, attribute))

    def stack_global(self, _: Any) -> None:
        attribute, module = self.stack.pop(), self.stack.pop()
        if not isinstance(module, str) or not isinstance(attribute, str):
            raise Refused("its pickle names something by what is no text")
        self.stack.append(self.name(module, attribute))

    def reduce(self, _: Any) -> None:
        arguments, what = self.stack.pop(), self.stack.pop()
        self.stack.append(self.call(what, arguments))

    def new_object_with_names(self, _: Any) -> None:
        named, arguments, what = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.append(self.call(what, (*arguments, named) if named else arguments))

    def instance(self, argument: str) -> None:
        module, _, attribute = argument.partition(" ")
        self.stack.append(self.call(self.name(module, attribute), tuple(self.marked())))

    def object_(self, _: Any) -> None:
        what, *arguments = self.marked()
        self.stack.append(self.call(what, tuple(arguments)))

    def tuple_of(self, count: int) -> None:
        found = tuple(self.stack[-count:])
        if len(found) < count:
            raise Refused("its pickle takes more than there is")
        del self.stack[-count:]
        self.stack.append(found)

    def pair(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.add_items([key, value])

    def dict_of_marked(self, _: Any) -> None:
        values = self.marked()
        self.stack.append(dict(zip(_keys(values[::2]), values[1::2], strict=True)))

    def put(self, index: int | None) -> None:
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]


_PUSHED = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
    "MARK": lambda: _MARK,
}
_IGNORED = {"PROTO", "FRAME"}
_STEPS: dict[str, Callable[[_Reader, Any], None]] = {
    "GLOBAL": _Reader.global_,
    "STACK_GLOBAL": _Reader.stack_global,
    "REDUCE": _Reader.reduce,
    "NEWOBJ": _Reader.reduce,
    "NEWOBJ_EX": _Reader.new_object_with_names,
    "INST": _Reader.instance,
    "OBJ": _Reader.object_,
    "BUILD": _Reader.build,
    "TUPLE": lambda reader, _: reader.stack.append(tuple(reader.marked())),
    "TUPLE1": lambda reader, _: reader.tuple_of(1),
    "TUPLE2": lambda reader, _: reader.tuple_of(2),
    "TUPLE3": lambda reader, _: reader.tuple_of(3),
    "LIST": lambda reader, _: reader.stack.append(reader.marked()),
    "DICT": _Reader.dict_of_marked,
    "FROZENSET": lambda reader, _: reader.stack.append(frozenset(_keys(reader.marked()))),
    "SETITEM": _Reader.pair,
    "SETITEMS": lambda reader, _: reader.add_items(reader.marked()),
    "APPEND": lambda reader, _: reader.add_elements([reader.stack.pop()]),
    "APPENDS": lambda reader, _: reader.add_elements(reader.marked()),
    "ADDITEMS": lambda reader, _: reader.add_elements(reader.marked()),
    "POP": lambda reader, _: reader.stack.__delitem__(-1),
    "POP_MARK": lambda reader, _: reader.marked().clear(),
    "DUP": lambda reader, _: reader.stack.append(reader.stack[-1]),
    "PUT": _Reader.put,
    "BINPUT": _Reader.put,
    "LONG_BINPUT": _Reader.put,
    "MEMOIZE": _Reader.put,
    "GET": lambda reader, index: reader.stack.append(reader.memo[index]),
    "BINGET": lambda reader, index: reader.stack.append(reader.memo[index]),
    "LONG_BINGET": lambda reader, index: reader.stack.append(reader.memo[index]),
    "BINPERSID": lambda reader, _: reader.stack.append(reader.stored(reader.stack.pop())),
}

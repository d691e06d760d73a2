"""Runs tests in one process and the code under test in another, so that code cannot pass its tests by a trick.

`_confined.py` forks before it reads anything. The process of the tests, which alone knows the tests and the word that
reports success, calls the code over two pipes. Plain values (numbers, texts, containers of them, dates and the like)
are copied. Other objects stay where they are, and a `Remote` stands for each. A comparison of one with a plain value
first fetches a plain value for it, so its `__eq__` decides nothing. Objects of classes that the tests name (with a
capital letter) do decide about themselves. For a function that the tests pass, the code gets one of the same name and
signature, which calls it.

Some tests cannot be apart from the code: those that define classes, decorate functions, set attributes, look at
identity or types, name exceptions of the code, or import more than the modules in `_PURE`. They run in the process of
the code, after it. The word is not there, and to exit early is to fail, but code that looks for the tests, or speaks
on the pipes as this file does, passes them.
"""

from __future__ import annotations

import ast
import builtins
import io
import marshal
import operator
import os
import struct
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

_ATOMS = frozenset({int, float, complex, str, bytes, bool, type(None)})
_BASES: tuple[Any, ...] = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
_CHANGEABLE = (list, dict, set, bytearray, Counter, OrderedDict, defaultdict, deque)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
_NAMES = ("__name__", "__qualname__", "__doc__", "__module__")
_STARRED, _NAMED = 4, 8
"""Flags of a function that takes any more arguments, and any with names."""
_PURE = frozenset(
    "bisect cmath collections copy datetime decimal fractions functools heapq itertools json math operator random re"
    " statistics string time typing".split()
)
"""Modules that tests may import without sharing anything with the code."""
_INWARD = frozenset("compile delattr dir eval exec globals input locals namedtuple setattr vars".split())
_VALUES: dict[tuple[str, str], Callable[[Any], tuple[Any, ...]]] = {
    ("builtins", "bytearray"): lambda value: (bytes(value),),
    ("builtins", "range"): lambda value: (value.start, value.stop, value.step),
    ("collections", "Counter"): lambda value: (dict(value),),
    ("collections", "OrderedDict"): lambda value: (list(value.items()),),
    ("collections", "defaultdict"): lambda value: (value.default_factory, dict(value)),
    ("collections", "deque"): lambda value: (list(value), value.maxlen),
    ("datetime", "date"): lambda value: value.__reduce__()[1],
    ("datetime", "datetime"): lambda value: value.__reduce__()[1],
    ("datetime", "time"): lambda value: value.__reduce__()[1],
    ("datetime", "timedelta"): lambda value: value.__reduce__()[1],
    ("decimal", "Decimal"): lambda value: (str(value),),
    ("fractions", "Fraction"): lambda value: (value.numerator, value.denominator),
}
"""Values that are copied although they are no containers of plain ones, with the arguments that make them anew."""


class _Discard(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


def _is_plain(value: Any) -> bool:
    """True if marshal copies the value as it is."""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind in (list, tuple, set, frozenset):
        return set(map(type, value)) <= _ATOMS or all(map(_is_plain, value))
    return kind is dict and _is_plain(list(value)) and _is_plain(list(value.values()))


def _is_builtin(value: Any) -> bool:
    return isinstance(value, types.BuiltinFunctionType | type) and vars(builtins).get(value.__name__) is value


def _changeable_values(values: Any) -> list[Any]:
    return [value for value in values if type(value) in _CHANGEABLE]


class _Line:
    """Both ends of the pipes: requests, each answered before the next, unless its answer needs a request back.

    Args:
        source: Descriptor to read from.
        sink: Descriptor to write to.
        operations: What the other side may ask for, by name.
        of_tests: True at the end of the tests, which the other end must not reach into.
    """

    def __init__(self, source: int, sink: int, operations: dict[str, Callable[..., Any]], of_tests: bool) -> None:
        self._source, self._sink, self._operations, self._of_tests = source, sink, operations, of_tests
        self._lent: list[Any] = []
        self._places: dict[Any, int] = {}
        self._borrowed: dict[int, Any] = {}
        self._handles: dict[int, int] = {}

    def ask(self, name: str, *arguments: Any, free: int = 0, keywords: dict[str, Any] | None = None) -> Any:
        """Have the other side do something.

        Args:
            free: As of a `Remote`, for objects in the answer.
            keywords: Arguments with names.
        """
        self._send(("ask", name, self._pack(arguments), self._pack(keywords or {})))
        while (message := self._receive())[0] == "ask":
            self._send(self._answer(*message[1:]))
        kind, answer, more = message
        if kind == "raised":
            error_class: Any = getattr(builtins, str(answer), None)
            if not isinstance(error_class, type) or not issubclass(error_class, Exception):
                error_class = RuntimeError
            try:
                error = error_class(*self._unpack(more))
            except TypeError:  # some need arguments of their own
                error = RuntimeError(answer)
            raise error
        for old, new in zip(
            _changeable_values((*arguments, *(keywords or {}).values())), self._unpack(more, free), strict=False
        ):
            old.clear()
            (old.update if hasattr(old, "update") else old.extend)(new)
        return self._unpack(answer, free)

    def serve(self) -> NoReturn:
        """Answer requests until the other side has gone."""
        while True:
            self._send(self._answer(*self._receive()[1:]))

    def _answer(self, name: str, packed_arguments: Any, packed_keywords: Any) -> tuple[Any, ...]:
        try:
            if self._of_tests and (packed_arguments[0] != "tuple" or packed_arguments[1][0][0] != "yours"):
                raise TypeError("this is no function of the tests")
            if name not in self._operations:
                raise AttributeError(f"objects of the tests are closed to {name}")
            arguments, keywords = self._unpack(packed_arguments), self._unpack(packed_keywords)
            changeable = _changeable_values((*arguments, *keywords.values()))
            before = marshal.dumps(self._pack(changeable), 2)
            answer = self._pack(self._operations[name](*arguments, **keywords))
            after = self._pack(changeable)
            return "done", answer, self._pack([]) if marshal.dumps(after, 2) == before else after
        except BaseException as error:
            kind = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
            error_arguments = error.args if _is_plain(error.args) else (str(error),)
            return "raised", kind.__name__, self._pack(error_arguments)

    def _pack(self, value: Any) -> tuple[Any, ...]:
        if _is_plain(value):
            return "=", value
        if isinstance(value, Remote):
            return "yours", _handle(value)
        if id(value) in self._handles:
            return "yours", self._handles[id(value)]
        kind = type(value)
        if kind in (list, tuple, set, frozenset):
            return kind.__name__, [self._pack(item) for item in value]
        if kind is dict:
            return "dict", [(self._pack(name), self._pack(item)) for name, item in value.items()]
        if arguments_of := _VALUES.get((kind.__module__, kind.__name__)):
            return "value", kind.__module__, kind.__name__, self._pack(arguments_of(value))
        if kind.__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
            return self._pack(value.item())
        if kind is types.ModuleType and value.__name__ in _PURE:
            return "module", value.__name__
        if _is_builtin(value) and (self._of_tests or value in _BASES):
            return "builtin", value.__name__
        if self._of_tests and kind in _FUNCTIONS:
            return "function", self._lend(value), self._pack(_describe_function(value))
        return "mine", self._lend(value)

    def _lend(self, value: Any) -> int:
        key = value if isinstance(value, types.BuiltinFunctionType) else id(value)  # each [].append is a new object
        place = self._places.setdefault(key, len(self._lent))
        if place == len(self._lent):
            self._lent.append(value)
        return place

    def _unpack(self, packed: Any, free: int = 0) -> Any:
        kind, *fields = packed
        if kind == "=" and _is_plain(fields[0]):
            return fields[0]
        if kind in ("list", "tuple", "set", "frozenset"):
            return getattr(builtins, kind)([self._unpack(item, free) for item in fields[0]])
        if kind == "dict":
            return {self._unpack(name, free): self._unpack(item, free) for name, item in fields[0]}
        if kind == "value" and (fields[0], fields[1]) in _VALUES:
            return getattr(__import__(fields[0]), fields[1])(*self._unpack(fields[2], free))
        if kind == "module" and fields[0] in _PURE:
            return __import__(fields[0])
        if kind == "builtin" and (not self._of_tests or getattr(builtins, fields[0]) in _BASES):
            return getattr(builtins, fields[0])
        if kind == "yours":
            return self._lent[fields[0]]
        if kind == "mine":
            return Remote(self, fields[0], free)
        if kind == "function" and not self._of_tests:
            if fields[0] not in self._borrowed:
                function = self._borrowed[fields[0]] = _proxy_of(Remote(self, fields[0], 0), *self._unpack(fields[1]))
                self._handles[id(function)] = fields[0]
            return self._borrowed[fields[0]]
        raise TypeError("no value arrived")

    def _send(self, message: tuple[Any, ...]) -> None:
        data = marshal.dumps(message, 2)
        unsent = memoryview(struct.pack("=Q", len(data)) + data)
        try:
            while unsent:
                unsent = unsent[os.write(self._sink, unsent) :]
        except OSError:
            os._exit(1)

    def _receive(self) -> tuple[Any, ...]:
        try:
            [size] = struct.unpack("=Q", self._read(8))
            message = marshal.loads(self._read(size))
            if message[0] in ("ask", "done", "raised"):
                return tuple(message)
        except Exception:  # noqa: S110  # no test may catch this
            pass
        os._exit(1)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            more = os.read(self._source, min(size - len(data), 1 << 20))
            if not more:
                os._exit(1)
            data += more
        return bytes(data)


class Remote:
    """An object of the other process.

    Args:
        line: The way there.
        handle: Its number there.
        free: 2 for a class and 1 for its objects, if they may decide what they are equal to; else less.
    """

    __slots__ = ("__free", "__handle", "__line")

    def __init__(self, line: _Line, handle: int, free: int) -> None:
        self.__line, self.__handle, self.__free = line, handle, free

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__line.ask("getattr", self, name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.__line.ask("call", self, *arguments, keywords=keywords, free=self.__free - 1)

    def __contains__(self, item: Any) -> bool:
        if self.__free > 0 or isinstance(item, Remote):
            return bool(self.__line.ask("contains", self, item))
        plain = self.__line.ask("plain", self) if isinstance(item, str | bytes) else None
        if isinstance(plain, str | bytes):
            return bool(operator.contains(plain, item))
        return any(element == item for element in iter(self))

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and bool(self.__line.ask("isinstance", instance, self))

    def _decide(self, name: str, *operands: Any) -> Any:
        """Let the object itself do it if it is free to, or if it learns of nothing that it could adapt to."""
        others = [operand for operand in operands if operand is not self]
        if self.__free > 0 or name in _TELLING or (others and all(isinstance(operand, Remote) for operand in others)):
            return self.__line.ask(name, *operands, free=0 if name in _TELLING else min(self.__free, 1))
        plain = self.__line.ask("plain", self)
        plain = object() if isinstance(plain, Remote) else plain
        return _OPERATIONS[name](*(plain if operand is self else operand for operand in operands))


def _handle(remote: Remote) -> int:
    return int(remote._Remote__handle)


def _plain_form(value: Any) -> Any:
    """A plain value for an object of a class derived from a plain one, or an array; else the object."""
    for base in _BASES:
        if isinstance(value, base):
            return base(value)
    if isinstance(value, type({}.keys())):
        return set(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _describe_function(function: Any) -> tuple[Any, ...]:
    """The names, parameters, defaults and annotations of a function, as `_proxy_of` takes them."""
    names = {name: getattr(function, name, None) for name in _NAMES}
    if not isinstance(function, types.FunctionType):
        return names, (("given", "named"), 0, 0, 0, _STARRED | _NAMED), None, None, {}
    code = function.__code__
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & (_STARRED | _NAMED)
    parameters = code.co_varnames[: counts[0] + counts[2] + bool(counts[3] & _STARRED) + bool(counts[3] & _NAMED)]
    return names, (parameters, *counts), function.__defaults__, function.__kwdefaults__, function.__annotations__


def _proxy_of(remote: Any, names: Any, signature: Any, defaults: Any, named_defaults: Any, annotations: Any) -> Any:
    """A function that calls `remote` and looks like the function of the tests which that is."""
    parameters, positional_count, before_slash, keyword_count, flags = signature
    end = positional_count + keyword_count
    keyword_only, variadic = parameters[positional_count:end], list(parameters[end:])
    starred = [f"*{variadic.pop(0)}"] if flags & _STARRED else []
    double_starred = [f"**{parameter}" for parameter in variadic]
    positional = [*parameters[:before_slash], *["/"][:before_slash], *parameters[before_slash:positional_count]]
    declared = [*positional, *(starred or ["*"][:keyword_count]), *keyword_only, *double_starred]
    by_name = [f"{parameter}={parameter}" for parameter in keyword_only]
    passed = [*parameters[:positional_count], *starred, *by_name, *double_starred]
    remote_name = "_" + "".join(parameters)
    text = f"lambda {remote_name}: lambda {', '.join(declared)}: {remote_name}({', '.join(passed)})"
    function = eval(text, {})(remote)  # noqa: S307 - of the process that runs any code
    function.__defaults__, function.__kwdefaults__, function.__annotations__ = defaults, named_defaults, annotations
    for name, value in names.items():
        setattr(function, name, value)
    return function


def _type_test(name: str) -> Callable[[Any, Any], bool]:
    """`isinstance` or `issubclass` for tests: a named tuple of the code is a tuple."""

    def ask(value: Any, kinds: Any) -> bool:
        is_local = not isinstance(value, Remote)
        return bool(_OPERATIONS[name](value, kinds) if is_local else value._Remote__line.ask(name, value, kinds))

    return ask


def _call(function: Any, /, *arguments: Any, **keywords: Any) -> Any:
    return function(*arguments, **keywords)


_ITEMS = ("getitem", "setitem", "delitem")
_TELLING = (*_ITEMS, "bool", "format", "hash", "iter", "len", "next", "repr", "reversed", "str")
_UNARY = ("neg", "pos", "abs", "invert", "index", "int", "float", "complex", "round")
_COMPARING = ("eq", "ne", "lt", "le", "gt", "ge")
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift")
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*_UNARY[:5], *_COMPARING, *_BINARY, *_ITEMS, "contains")},
    **{one.__name__: one for one in (bool, format, hash, iter, len, next, repr, reversed, str)},
    **{one.__name__: one for one in (int, float, complex, round, isinstance, issubclass)},
    **{"getattr": getattr, "call": _call, "plain": _plain_form},
}
_OF_TESTS = ("bool", "call", "eq", "getitem", "hash", "iter", "len", "ne", "next", "repr", "str")
"""Operations on functions and iterators that tests pass to the code."""


def _method(name: str, reflected: bool = False) -> Callable[..., Any]:
    def method(self: Remote, *others: Any) -> Any:
        return self._decide(name, *others, self) if reflected else self._decide(name, self, *others)

    return method


for _name in (*_TELLING, *_UNARY, *_COMPARING, *_BINARY):
    setattr(Remote, f"__{_name.strip('_')}__", _method(_name))
for _name in _BINARY:
    setattr(Remote, f"__r{_name.strip('_')}__", _method(_name, reflected=True))


def _can_be_apart(tests: ast.Module) -> bool:
    """True if tests only call what the code defines, and look at the results. The code has no say in this."""
    for node in ast.walk(tests):
        if isinstance(node, ast.ClassDef | ast.AsyncFunctionDef | ast.With | ast.Match):
            return False
        if getattr(node, "decorator_list", ()) or isinstance(node, ast.Compare) and not _compares_values(node):
            return False
        if isinstance(node, ast.Constant) and str(node.value).startswith("__") and node.value != "__main__":
            return False
        if isinstance(node, ast.Import) and not all(alias.name in _PURE for alias in node.names):
            return False
        if isinstance(node, ast.ImportFrom) and (node.level or node.module not in _PURE):
            return False
        if isinstance(node, ast.Attribute) and (
            not isinstance(node.ctx, ast.Load) or node.attr.startswith("__") or node.attr in ("seed", "namedtuple")
        ):
            return False
        if isinstance(node, ast.Name) and (node.id in _INWARD or node.id.startswith("__") and node.id != "__name__"):
            return False
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if not all(isinstance(kind, ast.Name) and hasattr(builtins, kind.id) for kind in kinds):
                return False
    return True


def _compares_values(node: ast.Compare) -> bool:
    """False if the identity or the type of an object decides, which differ apart; those of Python's own do not."""
    sides = [node.left, *node.comparators]
    foreign = [not isinstance(side, ast.Constant) and getattr(side, "id", "") not in vars(builtins) for side in sides]
    typed = [isinstance(side, ast.Call) and getattr(side.func, "id", "") == "type" for side in sides]
    decides = [isinstance(comparison, ast.Is | ast.IsNot) for comparison in node.ops]
    return not any(
        foreign[place] and foreign[place + 1] and (decides[place] or typed[place] or typed[place + 1])
        for place in range(len(decides))
    )


def _names_of_code(tests: ast.Module) -> set[str]:
    """Names that tests may take from the code: not those of Python, unless they name nothing else."""
    names = [node for node in ast.walk(tests) if isinstance(node, ast.Name)]
    loaded = {node.id for node in names if isinstance(node.ctx, ast.Load)} - {"__name__"}
    stored = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    defined = {node.name for node in ast.walk(tests) if isinstance(node, ast.FunctionDef)}
    defined |= {node.arg for node in ast.walk(tests) if isinstance(node, ast.arg)}
    foreign = {name for name in loaded if not hasattr(builtins, name)}
    return foreign if foreign - stored - defined else loaded


def run_tests(source: int, sink: int, code: str, tests: str, word: str) -> None:
    """Print `word` if the tests run through. The code runs at the other end of the pipes."""
    sys.stdout = sys.stderr = _Discard()
    line = _Line(source, sink, {name: _OPERATIONS[name] for name in _OF_TESTS}, of_tests=True)
    tree = ast.parse(tests, "<tests>")
    line.ask("run", code, "<code>")
    if _can_be_apart(tree):
        space: dict[str, Any] = {"__name__": "__main__"}
        for name in _names_of_code(tree):
            for value in line.ask("names", name, free=2 if name[:1].isupper() else 0):
                space[name] = value
        space |= {name: _type_test(name) for name in ("isinstance", "issubclass")}
        exec(compile(tree, "<tests>", "exec", dont_inherit=True), space)
    else:
        line.ask("run", tests, "<tests>")
        challenge = os.urandom(16).hex()
        if line.ask("str", challenge) != challenge:
            return
    os.write(1, word.encode())


def serve_code(source: int, sink: int) -> NoReturn:
    """Run code, and what tests ask of it, until the tests have ended."""
    sys.stdout = sys.stderr = _Discard()
    space: dict[str, Any] = {"__name__": "__main__"}

    def run(text: str, name: str) -> None:
        exec(compile(text, name, "exec", dont_inherit=True), space)

    def names(name: str) -> list[Any]:
        return [space[name]] if name in space else []

    _Line(source, sink, {**_OPERATIONS, "run": run, "names": names}, of_tests=False).serve()

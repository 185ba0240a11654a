"""The small changes that make a mutant of a source, as text put in place of a span of it.

They are near misses, such as an author of an oracle makes them: the wrong one of two comparisons, one more or less, a
factor inverted, operands or arguments exchanged, a condition or a statement forgotten.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from copy import deepcopy

# Put the text in place of the bytes from the first position to the second.
Change = tuple[int, int, str]

_COMPARISONS = {
    ast.Lt: ("<", "<=", ">="), ast.LtE: ("<=", "<", ">"), ast.Gt: (">", ">=", "<="), ast.GtE: (">=", ">", "<"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"), ast.Pow: ("**", "*"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.BitXor: ("^", "|"),
}  # fmt: skip
_NOT_COMMUTATIVE = (ast.Sub, ast.Div, ast.MatMult)
# Names of functions and methods, and what could be meant instead; "" leaves the argument as it is.
_NAMES = {
    "min": "max", "max": "min", "amin": "amax", "amax": "amin", "argmin": "argmax", "argmax": "argmin",
    "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor",
    "zeros": "ones", "ones": "zeros", "zeros_like": "ones_like", "ones_like": "zeros_like", "sum": "max",
    "prod": "sum", "mean": "sum", "sorted": "list", "reversed": "list", "set": "list", "abs": "", "round": "",
}  # fmt: skip

# Functions that do not care for the order of two arguments.
_SYMMETRIC = ("min", "max", "minimum", "maximum", "equal", "array_equal")
# Methods that change what a number is kept in, not the number.
_CONVERSIONS = ("tolist", "item")
# What need not be said, and is; to zip strictly can be left out in one way, not two.
_DEFAULTS = (("zeros", "dtype=np.float64"), ("ones", "dtype=np.float64"), ("zip", "strict=True"))


class Text:
    """A source as the bytes that the positions of its syntax tree count."""

    def __init__(self, source: str) -> None:
        self._bytes = source.encode()
        self._starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends."""
        begin = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return begin, self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def between(self, left: ast.AST, right: ast.AST) -> tuple[int, int]:
        """Return the span between two nodes."""
        return self.span(left)[1], self.span(right)[0]

    def of(self, start: int, end: int) -> str:
        """Return what stands in a span."""
        return self._bytes[start:end].decode()

    def replaced(self, start: int, end: int, new: str) -> str:
        """Return the source with another text in a span."""
        return self.of(0, start) + new + self.of(end, len(self._bytes))

    def line(self, position: int) -> int:
        """Return the number of the line of a position, from 1."""
        return sum(start <= position for start in self._starts)

    def lines(self, start: int, end: int, new: str) -> tuple[str, str]:
        """Return the lines of a span as they are and with another text in it, each as one line."""
        begin, stop = self._starts[self.line(start) - 1], self._starts[self.line(end)]
        after = self.of(begin, start) + new + self.of(end, stop)
        return " ".join(self.of(begin, stop).split()), " ".join(after.split())


def changes(node: ast.AST, text: Text, last: bool) -> Iterator[Change]:
    """Yield all changes of a node itself, not of what is within it.

    Args:
        node: an expression, a statement, a slice or the head of a comprehension.
        text: the source.
        last: whether nothing follows the node in its function, so that to return there is to end it.
    """
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for place, operator in enumerate(node.ops):
            yield from _swapped(text, operands[place], operands[place + 1], _COMPARISONS[type(operator)])
    elif isinstance(node, ast.BinOp):
        yield from _arithmetic(node, text)
    elif isinstance(node, ast.BoolOp):
        yield from _boolean(node, text)
    elif isinstance(node, ast.UnaryOp):
        yield *text.span(node), f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant):
        yield from ((*text.span(node), new) for new in _constants(node.value))
    elif isinstance(node, ast.Call):
        yield from _calls(node, text)
    elif isinstance(node, ast.Slice):
        yield from _slices(node, text)
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        if not isinstance(node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp)):  # those have changes of their own
            yield *text.span(node.test), f"(not {ast.unparse(node.test)})"
    elif isinstance(node, ast.comprehension):
        yield from ((*text.span(condition), "True") for condition in node.ifs)
    elif isinstance(node, ast.stmt):
        yield from _statements(node, text, last)


def _swapped(text: Text, left: ast.expr, right: ast.expr, symbols: tuple[str, ...]) -> Iterator[Change]:
    """Yield other operators between two operands, in place of the first symbol."""
    start, end = text.between(left, right)
    for new in symbols[1:]:
        yield start, end, text.of(start, end).replace(symbols[0], new, 1)


def _arithmetic(node: ast.BinOp, text: Text) -> Iterator[Change]:
    if type(node.op) in _ARITHMETIC:
        yield from _swapped(text, node.left, node.right, _ARITHMETIC[type(node.op)])
    if isinstance(node.op, _NOT_COMMUTATIVE):
        yield *text.span(node), ast.unparse(ast.BinOp(node.right, node.op, node.left))
    if isinstance(node.op, ast.FloorDiv):  # rounded up
        yield *text.span(node), f"(-(-({ast.unparse(node.left)}) // ({ast.unparse(node.right)})))"


def _boolean(node: ast.BoolOp, text: Text) -> Iterator[Change]:
    for place, value in enumerate(node.values):
        if place:
            symbols = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from _swapped(text, node.values[place - 1], value, symbols)
        rest = [other for other in node.values if other is not value]
        yield *text.span(node), f"({ast.unparse(rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))})"


def _constants(value: object) -> list[str]:
    if isinstance(value, bool):
        return [repr(not value)]
    if isinstance(value, int):
        return [repr(value + 1), repr(value - 1)]
    if isinstance(value, float):
        return [repr(value + 1), repr(value - 1)]
    return [repr(value + "?")] if isinstance(value, str) else []


def _calls(node: ast.Call, text: Text) -> Iterator[Change]:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    for place, keyword in enumerate(node.keywords):
        if (name, ast.unparse(keyword)) in _DEFAULTS:
            continue
        less = deepcopy(node)
        del less.keywords[place]
        yield *text.span(node), ast.unparse(less)
    two = len(node.args) > 1 and not any(isinstance(argument, ast.Starred) for argument in node.args[:2])
    if two and name not in _SYMMETRIC:
        exchanged = deepcopy(node)
        exchanged.args[:2] = reversed(exchanged.args[:2])
        yield *text.span(node), ast.unparse(exchanged)
    if isinstance(function, ast.Attribute):
        start = text.span(function.value)[1]
        if not node.args and not node.keywords and name not in _CONVERSIONS:  # x.clone() becomes x
            yield *text.span(node), f"({ast.unparse(function.value)})"
        if _NAMES.get(name):
            yield start, text.span(function)[1], f".{_NAMES[name]}"
    elif name in _NAMES:
        yield *text.span(function), _NAMES[name]
    elif name == "range":
        yield from _shifted(node.args[1] if len(node.args) > 1 else node.args[0], text)


def _slices(node: ast.Slice, text: Text) -> Iterator[Change]:
    for bound in (node.lower, node.upper):
        if bound is not None:
            yield *text.span(bound), ""
            yield from _shifted(bound, text)


def _shifted(bound: ast.expr, text: Text) -> Iterator[Change]:
    """Yield one more and one less than a number that is no literal, which has such changes itself."""
    if not isinstance(bound, ast.Constant):
        for sign in "+-":
            yield *text.span(bound), f"{ast.unparse(bound)} {sign} 1"


def _statements(node: ast.stmt, text: Text, last: bool) -> Iterator[Change]:
    if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
        symbol, *others = _ARITHMETIC[type(node.op)]
        yield from _swapped(text, node.target, node.value, (f"{symbol}=", *(f"{other}=" for other in others)))
    if _can_be_left_out(node, last):
        yield *text.span(node), "pass"
    if isinstance(node, ast.Continue):
        yield *text.span(node), "break"
    if isinstance(node, ast.Break):
        yield *text.span(node), "continue"


def _can_be_left_out(node: ast.stmt, last: bool) -> bool:
    """Tell a statement that others do not need to run: no definition, and not the end of a function."""
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], (ast.Subscript, ast.Attribute))
    if isinstance(node, ast.Return):
        return not last
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return called or isinstance(node, (ast.AugAssign, ast.Raise, ast.Continue, ast.Break))

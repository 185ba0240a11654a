"""All mutants of a source file: copies that differ in one small way, such as `<` for `<=`.

Not mutated: type hints, docstrings, decorators, what an error says, and f-strings.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tools.mutants import operators

# An expression or a statement, the name of the function around it, and whether its block ends with it.
_Place = tuple[ast.AST, str, bool]


@dataclass(frozen=True)
class Mutant:
    """A source with one change: where, the lines that differ before and after it, and all of the changed source."""

    file: str
    function: str
    line: int
    before: str
    after: str
    source: str = field(repr=False)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What names this mutant as long as its lines stay as they are, wherever they move within the function."""
        return self.file, self.function, self.before, self.after

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before}  ->  {self.after}"


def mutants_of(source: str, file: str) -> list[Mutant]:
    """Return every mutant of a file, in the order of its lines; each is Python and differs in more than its looks."""
    text = operators.Text(source)
    return [
        Mutant(file, function, text.line(start), *text.lines(start, end, new), text.replaced(start, end, new))
        for statement in ast.parse(source).body
        if not (_is_no_code(statement) or _is_alias(statement))
        for function, (start, end, new) in _different(statement, text)
    ]


def _different(statement: ast.stmt, text: operators.Text) -> Iterator[tuple[str, operators.Change]]:
    """Yield changes of one statement of a module that leave it Python, no two of them to the same."""
    begin, stop = text.span(statement)
    seen = {_meaning(text.of(begin, stop))}
    for node, function, last in _places(statement, "module", last=True):
        for start, end, new in operators.changes(node, text, last):
            meaning = _meaning(text.of(begin, start) + new + text.of(end, stop))
            if meaning and meaning not in seen:
                seen.add(meaning)
                yield function, (start, end, new)


def _meaning(source: str) -> str:
    """Return a statement without its looks, or nothing if it is not Python."""
    try:
        return ast.dump(ast.parse(source))
    except SyntaxError:
        return ""


def _places(node: ast.AST, function: str, *, last: bool) -> Iterator[_Place]:
    """Yield what may be changed, outermost first."""
    if isinstance(node, ast.JoinedStr) or _is_no_code(node):
        return
    yield node, function, last
    if isinstance(node, ast.Raise):
        return  # what it says is free, that it raises is not
    if isinstance(node, ast.FunctionDef):
        function = node.name
        children: Iterator[tuple[ast.AST, bool]] = _marked([*node.args.defaults, *node.args.kw_defaults], node.body)
    elif isinstance(node, ast.ClassDef):
        children = ((child, False) for child in node.body)
    elif isinstance(node, ast.AnnAssign):
        children = _marked([node.value])
    elif isinstance(node, ast.Assert):
        children = _marked([node.test])
    elif isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
        children = ((child, False) for child in ast.iter_child_nodes(node))
    else:
        children = ((child, last) for child in ast.iter_child_nodes(node))
    for child, is_last in children:
        yield from _places(child, function, last=is_last)


def _marked(*blocks: Sequence[ast.AST | None]) -> Iterator[tuple[ast.AST, bool]]:
    """Yield each node of some blocks, and whether it is the last one of all."""
    nodes = [node for block in blocks for node in block if node is not None]
    for node in nodes:
        yield node, node is nodes[-1]


def _is_no_code(node: ast.AST) -> bool:
    """Tell docstrings and imports."""
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return docstring or isinstance(node, (ast.Import, ast.ImportFrom))


def _is_alias(node: ast.AST) -> bool:
    """Tell the definition of a type, such as `Ids = Sequence[int]` or `T = TypeVar("T")`."""
    if not isinstance(node, ast.Assign):
        return False
    value = node.value
    made = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("TypeVar", "NewType")
    return made or isinstance(value, ast.Subscript)

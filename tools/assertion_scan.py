"""Finds assertions that cannot fail in our own tests.

A check that is always green is worse than none: it is counted. Every rule below is one way in which a test
looks as if it judged something and does not. Run it as `python -m tools.assertion_scan FOLDER...`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

Hit = tuple[ast.AST, str]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

# Functions that answer "are they the same?" and do nothing else: a discarded answer judges nothing.
COMPARISONS = frozenset({"equal", "allclose", "isclose", "array_equal", "array_equiv", "all", "any", "isinstance"})
# A call by such a name judges: `check_...`, `assert_...`, pytest.raises, a pytester line matcher.
JUDGING_CALL = re.compile(
    r"^_?(assert|check|expect|judge|verify|raises$|warns$|fail$|(no_)?(re_match|fnmatch)_lines?)|assert_"
)
JUDGING_OWNER = re.compile(r"^judg(e|ing)$")
WIDE = frozenset({"Exception", "BaseException"})
SWALLOWING = WIDE | {"AssertionError"}


@dataclass(frozen=True)
class Finding:
    """One assertion that cannot fail: where it stands, which rule it breaks and what to write instead."""

    filename: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.filename}:{self.line}: {self.rule}: {self.message}"


def scan(source: str, filename: str) -> list[Finding]:
    """Return every finding of every rule in one file's source, by line.

    Raises:
        SyntaxError: the source is not Python.
    """
    tree = ast.parse(source, filename)
    found = [
        Finding(filename, getattr(node, "lineno", 1), rule, message)
        for rule, find in RULES.items()
        for node, message in find(tree)
    ]
    return sorted(found, key=lambda finding: (finding.line, finding.rule))


# ---- reading expressions ---------------------------------------------------------------------------------


def name_of(node: ast.AST) -> str:
    """Return the last part of a dotted name (`torch.equal` -> `equal`), or "" when it has none."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def owner_of(node: ast.AST) -> str:
    """Return the part before the last dot (`judge.equal` -> `judge`), or "" when there is none."""
    return name_of(node.value) if isinstance(node, ast.Attribute) else ""


def always_true(node: ast.expr) -> bool:
    """Decide whether an expression is true whatever the code under test does."""
    match node:
        case ast.Constant(value=value):
            return bool(value)
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return any(not isinstance(part, ast.Starred) for part in parts)
        case ast.Dict(keys=keys):
            return any(key is not None for key in keys)
        case ast.JoinedStr(values=parts):
            return any(isinstance(part, ast.Constant) for part in parts)
        case ast.Lambda() | ast.GeneratorExp():
            return True
        case ast.BoolOp(op=ast.Or(), values=parts):
            return any(map(always_true, parts))
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(map(always_true, parts))
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return always_false(part)
        case ast.Attribute(attr=attr):
            return attr in COMPARISONS  # a method that was never called
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return is_reflexive(left, op, right) or is_length_at_least_zero(left, op, right)
    return False


def always_false(node: ast.expr) -> bool:
    """Decide whether an expression is false whatever the code under test does."""
    match node:
        case ast.Constant(value=value):
            return not value
        case ast.Tuple(elts=[]) | ast.List(elts=[]) | ast.Dict(keys=[]):
            return True
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return always_true(part)
    return False


def is_reflexive(left: ast.expr, op: ast.cmpop, right: ast.expr) -> bool:
    """Decide `a == a`, `a is a`, `a <= a`: calls may answer differently each time, so they are let pass."""
    if any(isinstance(part, ast.Call) for part in ast.walk(left)):
        return False
    return isinstance(op, ast.Eq | ast.Is | ast.LtE | ast.GtE) and ast.dump(left) == ast.dump(right)


def is_length_at_least_zero(left: ast.expr, op: ast.cmpop, right: ast.expr) -> bool:
    """Decide `len(a) >= 0`."""
    is_length = isinstance(left, ast.Call) and name_of(left.func) == "len"
    return is_length and isinstance(op, ast.GtE) and isinstance(right, ast.Constant) and right.value == 0


def conditionals(node: ast.expr) -> Iterator[ast.IfExp]:
    """Yield the conditional expressions that decide an assertion: its top, or an operand of and/or/not."""
    match node:
        case ast.IfExp():
            yield node
        case ast.BoolOp(values=parts):
            for part in parts:
                yield from conditionals(part)
        case ast.UnaryOp(operand=part):
            yield from conditionals(part)


# ---- reading statements ----------------------------------------------------------------------------------


def asserts(tree: ast.AST) -> Iterator[ast.Assert]:
    """Yield every assert statement at any depth."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Assert))


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield every call at any depth."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield every list of statements that run one after the other."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                yield block


def with_call(tree: ast.AST, *names: str) -> Iterator[tuple[ast.With, ast.Call]]:
    """Yield every with statement whose manager is a call of one of the names, and that call."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.With):
            continue
        for item in node.items:
            if isinstance(item.context_expr, ast.Call) and name_of(item.context_expr.func) in names:
                yield node, item.context_expr


def loose_statements(tree: ast.AST) -> Iterator[ast.Expr]:
    """Yield expression statements, less those that a `pytest.raises` around them expects to raise."""
    expected = {id(part) for node, _ in with_call(tree, "raises", "warns") for part in ast.walk(node)}
    return (node for node in ast.walk(tree) if isinstance(node, ast.Expr) and id(node) not in expected)


def exception_names(node: ast.expr | None) -> set[str]:
    """Return the names of the exceptions that a handler or `raises` takes; a bare `except` takes all."""
    if node is None:
        return {"BaseException"}
    return {name_of(part) for part in (node.elts if isinstance(node, ast.Tuple) else [node])}


# ---- the rules -------------------------------------------------------------------------------------------


def conditional(tree: ast.AST) -> Iterator[Hit]:
    """`assert a if c else b` asserts only one of the two, and which one is not what it reads like."""
    for statement in asserts(tree):
        for node in conditionals(statement.test):
            yield node, "a conditional decides what is asserted; write an if statement or one expected value"


def constant(tree: ast.AST) -> Iterator[Hit]:
    """`assert (x, "m")`, `assert a == a`, `assert x.equal` and the like are true of any code."""
    for statement in asserts(tree):
        if always_true(statement.test):
            yield statement, f"`{ast.unparse(statement.test)}` is always true"


def comparison_as_message(tree: ast.AST) -> Iterator[Hit]:
    """`assert a, b == c` compares only when it has failed already."""
    for statement in asserts(tree):
        if isinstance(statement.msg, ast.Compare | ast.BoolOp):
            yield statement, "a comparison stands where the message belongs; join the two with `and`"


def bare_comparison(tree: ast.AST) -> Iterator[Hit]:
    """`a == b` as a statement compares and forgets."""
    for node in loose_statements(tree):
        if isinstance(node.value, ast.Compare | ast.BoolOp):
            yield node, f"`{ast.unparse(node.value)}` is compared and forgotten; assert it"


def discarded(tree: ast.AST) -> Iterator[Hit]:
    """`torch.equal(a, b)` as a statement answers and is not heard."""
    for node in loose_statements(tree):
        call = node.value
        if isinstance(call, ast.Call) and name_of(call.func) in COMPARISONS and not is_judge(call):
            yield node, f"the result of `{name_of(call.func)}` is discarded; assert it"


def swallowed(tree: ast.AST) -> Iterator[Hit]:
    """An assert whose failure is caught and dropped cannot fail the test."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Try) or not any(True for part in node.body for _ in asserts(part)):
            continue
        for handler in node.handlers:
            if exception_names(handler.type) & SWALLOWING and all(map(does_nothing, handler.body)):
                yield handler, "this handler drops the AssertionError of the asserts above it"
    for block, call in with_call(tree, "suppress"):
        if {name_of(part) for part in call.args} & SWALLOWING and any(True for _ in asserts(block)):
            yield block, "`suppress` drops the AssertionError of the asserts inside"


def wide_raises(tree: ast.AST) -> Iterator[Hit]:
    """`pytest.raises(Exception)` is content with any mistake, a typing error in the test included."""
    for block, call in with_call(tree, "raises"):
        named = any(item.optional_vars for item in block.items if item.context_expr is call)
        matched = any(keyword.arg == "match" for keyword in call.keywords)
        if call.args and exception_names(call.args[0]) & WIDE and not named and not matched:
            yield block, "any exception will do; name its type, or match its message"


def unreachable(tree: ast.AST) -> Iterator[Hit]:
    """An assert that no run reaches: below what raises as expected, or below return and its like."""
    for context, _ in with_call(tree, "raises"):
        for statement in context.body[1:]:
            if isinstance(statement, ast.Assert):
                yield statement, "the exception expected above it skips this assert; move it out of the block"
    for block in blocks(tree):
        ended = False
        for statement in block:
            if ended and isinstance(statement, ast.Assert):
                yield statement, "nothing below this point of the block runs"
            ended = ended or isinstance(statement, ast.Return | ast.Raise | ast.Continue | ast.Break)


def judges_nothing(tree: ast.AST) -> Iterator[Hit]:
    """A test that neither asserts nor calls what asserts passes on any code that does not crash."""
    functions = [node for node in ast.walk(tree) if isinstance(node, FunctionNode)]
    judging = {node.name for node in functions if judges(node, frozenset())}
    while more := {node.name for node in functions if judges(node, frozenset(judging))} - judging:
        judging |= more
    for node in functions:
        if node.name.startswith("test_") and node.name not in judging:
            yield node, f"{node.name} asserts nothing; call a helper that does `check_...` or `assert_...`"


def judges(function: FunctionNode, helpers: frozenset[str]) -> bool:
    """Decide whether a function asserts itself, or calls a judge or one of the helpers that do."""
    if any(True for _ in asserts(function)):
        return True
    return any(
        name_of(call.func) in helpers or JUDGING_CALL.search(name_of(call.func)) is not None or is_judge(call)
        for call in calls(function)
    )


def is_judge(call: ast.Call) -> bool:
    """Decide whether a call goes to the suite's judge, which raises by itself."""
    return JUDGING_OWNER.search(owner_of(call.func)) is not None


def does_nothing(statement: ast.stmt) -> bool:
    """Decide whether a statement of a handler lets the failure go by."""
    passes = isinstance(statement, ast.Pass | ast.Continue | ast.Break | ast.Return)
    return passes or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))


RULES: dict[str, Callable[[ast.AST], Iterator[Hit]]] = {
    "conditional": conditional,
    "constant": constant,
    "comparison-as-message": comparison_as_message,
    "bare-comparison": bare_comparison,
    "discarded": discarded,
    "swallowed": swallowed,
    "wide-raises": wide_raises,
    "unreachable": unreachable,
    "judges-nothing": judges_nothing,
}


# ---- the tree --------------------------------------------------------------------------------------------


def scan_folders(folders: Iterable[Path]) -> tuple[int, list[Finding]]:
    """Return how many files were read and what was found in them.

    Raises:
        FileNotFoundError: a folder holds no Python file, so that nothing would be judged.
    """
    read, found = 0, []
    for folder in folders:
        files = sorted(folder.rglob("*.py"))
        if not files:
            raise FileNotFoundError(f"{folder} holds no Python file: give the folder of the tests")
        read += len(files)
        found += [finding for file in files for finding in scan(file.read_text("utf-8"), str(file))]
    return read, found


def main(arguments: list[str]) -> int:
    """Print the findings below the given folders; return 0 without findings, 1 with, 2 without a folder."""
    if not arguments:
        print("usage: python -m tools.assertion_scan FOLDER...", file=sys.stderr)
        return 2
    read, found = scan_folders(map(Path, arguments))
    for finding in found:
        print(finding)
    print(f"assertions that cannot fail: {len(found)} in {read} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

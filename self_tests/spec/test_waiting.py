"""Every oracle is reached by a check, or waits for one, as `waiting.toml` says; and how that is found out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from moe_conformance import spec
from moe_conformance.spec import deciding
from moe_conformance.spec.places import ROOT, Places, checked
from self_tests.spec.reached import Oracles

WAITING = deciding.waiting()
PACKAGE, CALLING = ROOT / "moe_conformance", ("judging", "chapters", "distributed_tests")
TREE = {
    "moe_conformance/reference/exchange/layer.py": """
        from moe_conformance.reference.experts import swiglu

        RULES = (Rule("EXCH-01", lambda: helper()),)
        def forward(experts): return swiglu(RULES)
        def helper(): ...
        def idle(experts): return experts
        """,
    "moe_conformance/reference/experts.py": "def swiglu(): ...\ndef experts(): ...\ndef gelu(): ...\n",
    "moe_conformance/judging/outputs.py": "from moe_conformance.reference.exchange import layer\nlayer.forward(1)\n",
    "moe_conformance/goldens/chapters/experts.py": "from moe_conformance.reference.experts import gelu\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Oracles:
    """Oracles that a judge, each other, and a golden name."""
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line.removeprefix(" " * 8) for line in text.split("\n")), encoding="utf-8")
    return Oracles(tmp_path)


class TestReached:
    def test_what_a_judge_names_and_what_that_leads_to(self, tree: Oracles) -> None:
        """By the name of a module, by a table and by an import; a parameter of the same name is no oracle."""
        expected = {"exchange.layer:forward", "exchange.layer:helper", "exchange.layer:RULES", "experts:swiglu"}
        assert expected == tree.checked

    def test_neither_a_golden_nor_another_idle_oracle_reaches_one(self, tree: Oracles) -> None:
        """What only these name is not reached."""
        assert {"exchange.layer:idle", "experts:experts", "experts:gelu"} == tree.public - tree.checked


def _read(node: ast.AST) -> set[str]:
    """Return the names that a definition reads."""
    loaded = {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)}
    return loaded | {found.attr for found in ast.walk(node) if isinstance(found, ast.Attribute)}


class TestHere:
    oracles = Oracles()

    def test_no_judge_is_idle(self) -> None:
        """A check or another definition names each: the first of those that only idle judges call is named by none."""
        judges, named = set[str](), set[str]()
        for path in (path for folder in CALLING for path in (PACKAGE / folder).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                name = node.name if isinstance(node, ast.FunctionDef) else ""
                judges |= {name} if name.startswith(("judge_", "require_")) else set()
                named |= _read(node) - {name}
        assert set() == judges - named

    def test_no_oracle_is_idle(self) -> None:
        """Each is reached by a check, or waits, or one that waits leads to it."""
        assert set() == self.oracles.public - self.oracles.checked - self.oracles.behind(WAITING)

    def test_none_that_waits_is_reached(self) -> None:
        """As soon as a check reaches it, it has to go from the list; and each is there."""
        assert set() == WAITING.keys() & self.oracles.checked
        assert set() == WAITING.keys() - self.oracles.public

    def test_each_waits_for_requirements_without_a_check(self) -> None:
        """Those which its docstring says that it decides."""
        claimed = Places().claimed
        for oracle, ids in WAITING.items():
            assert ids == sorted(id for id in claimed if oracle in claimed[id])
            assert set(ids) <= spec.load().keys() - checked()

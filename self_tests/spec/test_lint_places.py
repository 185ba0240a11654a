"""`tools/lint_places.py`, on a small tree of one check, oracle, line of native and planted bug; and here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from moe_conformance import spec
from moe_conformance.spec import Requirement
from moe_conformance.spec.places import Places
from tools.lint_places import problems

CHECK = "moe_conformance/distributed_tests/test_exchange.py"
ORACLE = "moe_conformance/reference/exchange/deliveries.py"
NATIVE = "moe_conformance/backends/native/exchange/dispatchers.py"
PLANT = "self_tests/chapters/exchange/plants/dispatch.py"
DECIDING = "moe_conformance/spec/deciding.toml"
TREE: Mapping[str, str] = {
    CHECK: (
        "class TestDispatch:\n"
        "    @requirement('EXCH-01', kind='probe')\n"
        "    def test_pairs(self, reading, tally): judge(reading, tally)\n"
    ),
    ORACLE: (
        "def deliveries(ids):\n    '''List them.\n\n    Decides: EXCH-01. Source: definition.\n    '''\n"
        "def others(ids):\n    '''List others.'''\n"
    ),
    DECIDING: '[EXCH-01]\n"exchange.deliveries:deliveries" = "native alltoall ep2 even"\n',
    NATIVE: "class Exchange:\n    '''An exchange.\n\n    Implements: EXCH-02,\n    EXCH-01.\n    '''\n",
    PLANT: 'EXPECTED = Expectation(\n    *("EXCH-01", "even"), "words"\n)\n',
}
ROW = (
    "from moe_conformance.judging.shared.exchange.deliveries import judge\n"
    "class TestDispatch:\n"
    "    test_pairs = Row('EXCH-01', ExchangeStep(), judge)\n"
    "    'Every pair arrives.'\n"
)
NO_ORACLE = (
    "EXCH-01: no oracle whose result its checks compare says `Decides: EXCH-01`, and the spec gives no `without_oracle`"
)
AGAIN = "run `python -m tools.deciding_oracles`"
NO_NATIVE = "EXCH-01: no line of native says `Implements: EXCH-01`, and the spec gives no `without_native`"


@pytest.fixture(name="tree")
def fixture_tree(tmp_path: Path) -> Path:
    """A tree in which nothing is missing."""
    for name, text in TREE.items():
        _write(tmp_path, name, text)
    return tmp_path


def _write(tree: Path, name: str, text: str) -> None:
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _problems(tree: Path, **given: str) -> list[str]:
    """Ask for the problems of a tree, of two requirements of which one has a check and the given reasons."""
    known = {id: spec.load()[id] for id in ("EXCH-01", "EXCH-02")}
    bare: dict[str, Requirement] = {
        id: replace(each, without_oracle="", without_native="") for id, each in known.items()
    }
    return list(problems(Places(tree), bare | {"EXCH-01": replace(bare["EXCH-01"], **given)}))  # type: ignore[arg-type]


class TestMissingPlaces:
    def test_nothing_is_missing(self, tree: Path) -> None:
        """A check, an oracle that decides, a line of native over two lines of text, and a planted bug: all is well."""
        assert [] == _problems(tree)

    def test_a_row_is_a_check(self, tree: Path) -> None:
        """A check that is written as a row has the same places as a function."""
        _write(tree, CHECK, ROW)
        assert [] == _problems(tree)

    def test_an_oracle(self, tree: Path) -> None:
        """An oracle that claims nothing is none; a reason in the spec is as good."""
        _write(tree, ORACLE, TREE[ORACLE].replace("Decides: EXCH-01.", ""))
        _write(tree, DECIDING, "")
        assert [NO_ORACLE] == _problems(tree)
        assert [] == _problems(tree, without_oracle="nobody hangs")

    def test_an_oracle_that_was_not_seen_to_decide(self, tree: Path) -> None:
        """One that claims the requirement beside the one that decides it is told; alone it is no oracle."""
        _write(tree, ORACLE, TREE[ORACLE].replace("List others.", "List others. Decides: EXCH-01."))
        unseen = f"EXCH-01: {ORACLE}:6 others says `Decides: EXCH-01`, and was not seen to; {AGAIN}"
        assert [unseen] == _problems(tree)
        _write(tree, DECIDING, "")
        first = f"EXCH-01: {ORACLE}:1 deliveries says `Decides: EXCH-01`, and was not seen to; {AGAIN}"
        assert [NO_ORACLE, first, unseen] == _problems(tree)

    def test_a_row_of_a_table(self, tree: Path) -> None:
        """It begins with the id, and is named by it: the first of two such rows."""
        _write(tree, ORACLE, "RULES = (\n    Rule('EXCH-01', 1),\n    Rule('EXCH-02'),\n    Rule('EXCH-01', 2),\n)\n")
        row = f"{ORACLE}:2 RULES[EXCH-01]"
        unseen = f"EXCH-01: {row} says `Decides: EXCH-01`, and was not seen to; {AGAIN}"
        _write(tree, DECIDING, "")
        assert [NO_ORACLE, unseen] == _problems(tree)
        _write(tree, DECIDING, '[EXCH-01]\n"exchange.deliveries:RULES[EXCH-01]" = "native alltoall ep2 even"\n')
        assert [] == _problems(tree)
        assert [row] == [str(place) for place in Places(tree).oracles("EXCH-01")]

    def test_a_line_of_native(self, tree: Path) -> None:
        """A line for another requirement is none; a reason in the spec is as good."""
        _write(tree, NATIVE, "class Exchange:\n    '''Implements: EXCH-02.'''\n")
        assert [NO_NATIVE] == _problems(tree)
        assert [] == _problems(tree, without_native="it follows from all of native")

    def test_a_planted_bug(self, tree: Path) -> None:
        """One that expects another requirement is none."""
        _write(tree, PLANT, 'EXPECTED = Expectation("EXCH-02", "even", "words")\n')
        assert ["EXCH-01: no planted bug expects it"] == _problems(tree)

    def test_a_requirement_without_a_check(self, tree: Path) -> None:
        """Nothing is asked of it."""
        (tree / CHECK).unlink()
        _write(tree, DECIDING, "")
        assert [] == _problems(tree)


class TestWhatShouldNotBeThere:
    def test_what_is_stored_of_an_oracle_that_is_gone(self, tree: Path) -> None:
        """It has another name, or claims the requirement no more; or no check is left."""
        stored = f"EXCH-01: exchange.deliveries:gone is stored as deciding it, and does not say so; {AGAIN}"
        _write(tree, DECIDING, TREE[DECIDING] + '"exchange.deliveries:gone" = "native alltoall ep2 even"\n')
        assert [stored] == _problems(tree)
        _write(tree, DECIDING, TREE[DECIDING])
        (tree / CHECK).unlink()
        assert [stored.replace(":gone", ":deliveries")] == _problems(tree)

    def test_a_reason_beside_an_oracle(self, tree: Path) -> None:
        """It does not hold any more."""
        expected = f"EXCH-01: the spec gives a reason `without_oracle`, and there is {ORACLE}:1 deliveries"
        assert [expected] == _problems(tree, without_oracle="nobody hangs")

    def test_a_reason_beside_a_line_of_native(self, tree: Path) -> None:
        """Nor does this."""
        expected = f"EXCH-01: the spec gives a reason `without_native`, and there is {NATIVE}:4 Exchange"
        assert [expected] == _problems(tree, without_native="it follows from all of native")

    def test_ids_that_do_not_exist(self, tree: Path) -> None:
        """In an oracle and in native."""
        _write(tree, ORACLE, TREE[ORACLE].replace("EXCH-01.", "EXCH-01, EXCH-98."))
        _write(tree, NATIVE, TREE[NATIVE].replace("EXCH-01.", "EXCH-01, EXCH-99."))
        assert [
            f"{ORACLE}:1 deliveries: says `Decides: EXCH-98`, which is no requirement",
            f"{NATIVE}:4 Exchange: says `Implements: EXCH-99`, which is no requirement",
        ] == _problems(tree)


class TestHere:
    def test_every_place_of_this_repository_is_there(self) -> None:
        """All requirements that have a check have an oracle, a line of native and a planted bug, or a reason."""
        assert [] == list(problems(Places(), spec.load()))

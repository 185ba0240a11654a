"""The run of mutants notices what a test sees, lists what none sees, and ends what loops."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tools.mutants import oracles, survivors
from tools.mutants.changes import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
ORACLE = '''"""A chapter."""

Numbers = list[int]


def halvings(number: int, start: int = 0) -> int:
    """Count how often a number can be halved: `number // 2 > 1`."""
    if start < 0:
        raise ValueError(f"start {start} is less than {0}")
    while number > 1:
        number = number // 2
        start += 1
    return start
'''
SECOND = """def halvings(number, start=True):
    return number.bit_length() or start
"""
TEST = """from moe_conformance.reference.groups import members as first
from self_tests.chapters.groups.second import members as second


def test_agree():
    for number in range(9):
        assert second.halvings(number, start=1) == first.halvings(number, start=1)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one pair, whose default start no test asks for, nor what is refused."""
    files = {
        "reference/groups/members.py": ORACLE,
        "self_tests/chapters/groups/second/members.py": SECOND,
        "self_tests/chapters/groups/test_pair.py": TEST,
        "tools/mutants/survivors.toml": "",
        "moe_conformance/chapters/groups/spec.toml": "",
    }
    packages = (
        "reference",
        "reference/groups",
        "self_tests",
        "self_tests/chapters",
        "self_tests/chapters/groups",
        "self_tests/chapters/groups/second",
        "moe_conformance",
        "moe_conformance/chapters/groups",
    )
    for name in packages:
        (tmp_path / name).mkdir(parents=True)
    for name in packages[:-1]:
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "moe_conformance" / "reference").symlink_to("../reference")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Callable[..., Any]]:
    """Runs a function in a process that may fork."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=120)


def tried(root: Path, afters: Sequence[str]) -> dict[str, str | None]:
    """Returns what noticed the mutants with these lines; nothing, an empty text."""
    from tools.mutants import trial

    made = {mutant.after: mutant for mutant in mutants_of(ORACLE, "reference/groups/members.py")}
    tests = oracles.Checkout(root).tests("reference/groups/members.py")
    trials = [trial.Trial(root, tests, made[after], seconds_per_test=1) for after in afters]
    return {each.mutant.after: verdict.by for each, verdict in trial.run(trials, jobs=2)}


def told(root: Path) -> tuple[int, str]:
    """Returns the exit code and the output of the command for the second oracle."""
    from click.testing import CliRunner

    from tools.mutants.__main__ import main

    result = CliRunner().invoke(
        main, ["--root", str(root), "--only", "self_tests/chapters/groups/second/members.py", "--all"]
    )
    return result.exit_code, result.output


class TestChanges:
    def test_every_mutant_is_another_program(self) -> None:
        """All parse, all differ, and none changes a type, a docstring or the text of an error."""
        made = mutants_of(ORACLE, "reference/groups/members.py")
        programs = {ast.dump(ast.parse(mutant.source)) for mutant in made}
        assert len(made) == len(programs - {ast.dump(ast.parse(ORACLE))})
        assert {"halvings"} == {mutant.function for mutant in made}
        for kept in ("list[int]", "start: int", "`number // 2 > 1`", "__future__"):
            assert all((kept in ORACLE) == (kept in mutant.source) for mutant in made)
        assert not [mutant for mutant in made if "raise" in mutant.after]

    def test_they_are_near_misses(self) -> None:
        """A comparison, a constant, a rounding and a statement each have theirs, named by their line."""
        made = {(mutant.line, mutant.after) for mutant in mutants_of(ORACLE, "reference/groups/members.py")}
        expected = {
            (6, "def halvings(number: int, start: int = 1) -> int:"),
            (8, "if start <= 0:"),
            (9, "pass"),
            (10, "while number >= 1:"),
            (11, "number = (-(-(number) // (2)))"),
            (12, "start -= 1"),
        }
        assert expected == expected & made


class TestTrials:
    def test_a_mutant_is_noticed_survives_or_is_ended(self, checkout: Path, elsewhere: Callable[..., Any]) -> None:
        """A test names itself, a mutant that none sees names nothing, and one that loops is ended by the clock."""
        before = {path: path.read_bytes() for path in checkout.rglob("*.py")}
        expected = {
            "start += 2": "self_tests/chapters/groups/test_pair.py::test_agree",
            "def halvings(number: int, start: int = 1) -> int:": "",
            "number = number // 1": "time",
        }
        assert expected == elsewhere(tried, checkout, list(expected))
        assert before == {path: path.read_bytes() for path in before}


class TestCommand:
    def test_survivors_need_their_entry_and_entries_their_survivor(
        self, checkout: Path, elsewhere: Callable[..., Any]
    ) -> None:
        """A survivor without an entry fails the run, and so does an entry that is noticed or that nothing makes."""
        file, (head, body) = "self_tests/chapters/groups/second/members.py", map(str.strip, SECOND.splitlines())
        lines = {
            "survivor": (head, "def halvings(number, start=False):"),
            "noticed": (body, "return number.bit_length() and start"),
            "stale": (body, "return 0"),
        }
        entries = {}
        for name, (before, after) in lines.items():
            entry = {"file": file, "function": "halvings", "before": before, "after": after, "reason": f"{name}: why"}
            entries[name] = "[[survivor]]\n" + "".join(f'{key} = "{value}"\n' for key, value in entry.items())
        known = checkout / survivors.FILE
        known.write_text(entries["noticed"] + entries["stale"])
        code, output = elsewhere(told, checkout)
        assert 1 == code
        assert f"nothing notices {file}:1: {head}  ->  def halvings(number, start=False):" in output
        assert "but self_tests/chapters/groups/test_pair.py::test_agree does: take the entry out" in output
        assert "return 0\nbut no such mutant is made: take it out" in output
        known.write_text(entries["survivor"])
        code, output = elsewhere(told, checkout)
        assert 0 == code, output
        assert "survivor: why" in output

    def test_tests_that_fail_anyway_notice_nothing(self, checkout: Path, elsewhere: Callable[..., Any]) -> None:
        """A pair that disagrees without a mutant is refused."""
        test = checkout / "self_tests" / "chapters" / "groups" / "test_pair.py"
        test.write_text(TEST + "    assert second.halvings(1, 1) == 2\n")
        code, output = elsewhere(told, checkout)
        assert 1 == code
        assert "chapters/groups/test_pair.py fails without a mutant" in output


class TestOracles:
    def test_every_oracle_has_a_chapter_and_a_test(self) -> None:
        """All files of both sides are held by a pair, and every known survivor is a mutant of its file."""
        files = oracles.Checkout(ROOT).oracles()
        assert len(files) > 80
        for file in files:
            assert oracles.Checkout(ROOT).chapter(file)
            assert oracles.Checkout(ROOT).tests(file)
        reasons = survivors.known(ROOT)
        made = [mutant for file in sorted({key[0] for key in reasons}) for mutant in _mutants(file)]
        assert [] == survivors.stale(reasons, made)

    def test_an_oracle_without_a_pair_is_refused(self, checkout: Path) -> None:
        """A file that no test of a pair imports has no tests, whatever its own examples say."""
        (checkout / "moe_conformance" / "chapters" / "routing").mkdir()
        (checkout / "moe_conformance" / "chapters" / "routing" / "spec.toml").touch()
        (checkout / "reference" / "routing.py").write_text('"""ROUTE-01\n>>> 1\n1\n"""\n')
        with pytest.raises(oracles.NotHeld, match=r"imports reference/routing.py"):
            oracles.Checkout(checkout).tests("reference/routing.py")


def _mutants(file: str) -> list[Mutant]:
    return mutants_of((ROOT / file).read_text(), file)

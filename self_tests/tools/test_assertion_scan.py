"""The scan of our own tests detects every assertion that cannot fail, and none that can."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

import pytest

from tools.assertion_scan import RULES, main, scan, scan_folders

CHECKOUT = Path(__file__).parents[2]

# rule -> bodies of a test that it must detect. Each body stands alone in one function.
BROKEN = {
    "conditional": [
        "assert a == b if c else True",
        "assert a == b if c else a == d",
        "assert a and (b if c else True)",
        "assert not (a if c else b)",
    ],
    "constant": [
        'assert (a == b, "they differ")',
        "assert True",
        "assert [a]",
        "assert {'k': a}",
        "assert f'{a} differs'",
        "assert (x == y for x, y in pairs)",
        "assert lambda: a == b",
        "assert a == b or 'message'",
        "assert not ()",
        "assert a.rows == a.rows",
        "assert len(a) >= 0",
        "assert torch.equal",
    ],
    "comparison-as-message": ["assert a, b == c", "assert a == b, c and d"],
    "bare-comparison": ["assert a\na == b", "assert a\na < b and b < c"],
    "discarded": [
        "assert a\ntorch.equal(a, b)",
        "assert a\na.allclose(b)",
        "assert a\nnp.isclose(a, b)",
        "assert a\nall(a)",
    ],
    "swallowed": [
        "try:\n    assert a == b\nexcept AssertionError:\n    pass",
        "for a in b:\n    try:\n        assert a\n    except Exception:\n        continue",
        "try:\n    assert a == b\nexcept:\n    'never mind'",
        "with contextlib.suppress(AssertionError):\n    assert a == b",
    ],
    "wide-raises": [
        "with pytest.raises(Exception):\n    a()",
        "with pytest.raises((ValueError, BaseException)):\n    a()",
    ],
    "unreachable": [
        "with pytest.raises(ValueError):\n    a()\n    assert b",
        "if a:\n    return\n    assert b",
    ],
    "judges-nothing": ["a()", "expected = a()\nprint(expected == b)"],
}

# The nearest bodies that can fail of the above: nothing at all may be found in them.
SOUND = {
    "conditional": ["assert a == (b if c else d)", "if c:\n    assert a == b"],
    "constant": [
        "assert a == (b, 'c')",
        "assert a",
        "assert []",
        "assert [*a]",
        "assert all(x == y for x, y in pairs)",
        "assert a or b",
        "assert not a",
        "assert a() == a()",
        "assert len(a) >= 1",
        "assert torch.equal(a, b)",
    ],
    "comparison-as-message": ["assert a == b, 'they differ'", "assert a == b, f'{a} for {b}'"],
    "bare-comparison": ["assert a == b", "with pytest.raises(TypeError):\n    a < b"],
    "discarded": [
        "assert torch.equal(a, b)",
        "same = a.allclose(b)\nassert same",
        "with pytest.raises(RuntimeError):\n    torch.allclose(a, b)",
        "judge.equal(a, b)",
    ],
    "swallowed": [
        "try:\n    assert a == b\nexcept AssertionError as error:\n    raise ValueError from error",
        "try:\n    a()\nexcept Exception:\n    pass\nassert b",
        "with contextlib.suppress(OSError):\n    assert a == b",
    ],
    "wide-raises": [
        "with pytest.raises(Exception, match='rank 1'):\n    a()",
        "with pytest.raises(Exception) as caught:\n    a()\nassert caught.value.rank == 1",
        "with pytest.raises(ValueError):\n    a()",
    ],
    "unreachable": ["with pytest.raises(ValueError):\n    a()\nassert b", "if a:\n    return\nassert b"],
    "judges-nothing": [
        "check_rows(a)",
        "torch.testing.assert_close(a, b)",
        "judge.deliveries(a, b)",
        "result.stdout.fnmatch_lines(['*passed*'])",
        "pytest.fail('no')",
    ],
}


def as_test(body: str) -> str:
    """Return the source of one test function around the body."""
    return "def test_it():\n" + indent(body, "    ") + "\n"


def rules_broken(source: str) -> set[str]:
    """Return the rules with a finding in the source."""
    return {finding.rule for finding in scan(source, "test_it.py")}


def every(bodies: dict[str, list[str]]) -> list[tuple[str, str]]:
    """Return (rule, body) for each body."""
    return [(rule, body) for rule, group in bodies.items() for body in group]


class TestRules:
    @pytest.mark.parametrize(("rule", "body"), every(BROKEN))
    def test_a_broken_body_breaks_its_rule_and_no_other(self, rule: str, body: str) -> None:
        """Every body that cannot fail is detected by the rule that says why, and by that one alone."""
        assert {rule} == rules_broken(as_test(body))

    @pytest.mark.parametrize(("rule", "body"), every(SOUND))
    def test_a_sound_body_breaks_no_rule(self, rule: str, body: str) -> None:
        """The nearest body that can fail has no finding."""
        assert set() == rules_broken(as_test(body))

    def test_every_rule_has_both_kinds_of_example(self) -> None:
        """A new rule cannot come without a body that it detects and one in which it finds nothing."""
        assert set(RULES) == set(BROKEN) == set(SOUND)


class TestHelpers:
    def test_a_helper_that_asserts_counts_through_any_number_of_calls(self) -> None:
        """A test may leave its asserts to a function of the same file that leaves them to another."""
        source = dedent("""
            def same(a, b):
                assert a == b

            def both(a, b):
                same(a, b)

            class TestIt:
                def test_it(self):
                    both(1, 1)
            """)
        assert set() == rules_broken(source)

    def test_a_helper_that_asserts_nothing_does_not_count(self) -> None:
        """A call of any other function of the file judges nothing."""
        source = "def show(a):\n    print(a)\n\ndef test_it():\n    show(1)\n"
        assert {"judges-nothing"} == rules_broken(source)


class TestFindings:
    def test_a_finding_names_file_line_and_rule(self) -> None:
        """What is printed leads to the line."""
        (finding,) = scan(as_test("a = 1\nassert (a, 'm')"), "test_it.py")
        assert "test_it.py:3: constant: `(a, 'm')` is always true" == str(finding)

    def test_findings_come_by_line(self) -> None:
        """Rules are run one by one, the findings are read from top to bottom."""
        body = "assert (a, 'm')\na == b\nassert a if b else c\ntorch.equal(a, b)"
        assert [2, 3, 4, 5] == [finding.line for finding in scan(as_test(body), "test_it.py")]


class TestTree:
    def test_our_own_tests_hold_no_assertion_that_cannot_fail(self) -> None:
        """The checks and the tests of the suite are clean, and there are some."""
        read, found = scan_folders([CHECKOUT / "self_tests", CHECKOUT / "distributed_tests"])
        assert [] == found
        assert read > 2

    def test_a_guilty_tree_is_an_exit_of_one(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The command prints every finding and fails."""
        (tmp_path / "test_it.py").write_text(as_test("assert True"))
        assert 1 == main([str(tmp_path)])
        assert "test_it.py:2: constant" in capsys.readouterr().out

    def test_an_empty_folder_is_an_error(self, tmp_path: Path) -> None:
        """A scan that reads nothing does not pass."""
        with pytest.raises(FileNotFoundError, match="holds no Python file"):
            main([str(tmp_path)])

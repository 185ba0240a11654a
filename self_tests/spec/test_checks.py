"""The checks that are found by name."""

from __future__ import annotations

import pytest

from moe_conformance.spec import checks


class TestFind:
    def test_every_check_is_found_by_its_path(self) -> None:
        """No two have the same one."""
        assert list(checks.checks()) == [checks.find(check.path) for check in checks.checks()]

    @pytest.mark.parametrize("path", ["test_exchange:TestDispatch.test_nothing", "test_nothing:TestIt.test_it", ""])
    def test_an_unknown_path_is_told(self, path: str) -> None:
        """Whether the file is unknown, or the name in it."""
        with pytest.raises(LookupError, match=f"there is no check {path} in this suite"):
            checks.find(path)


class TestCheck:
    def test_what_draws_workloads_or_asks_for_groups_does_not_read_cases(self) -> None:
        """A check of cases takes nothing else, and not a tally alone."""
        others = {argument for check in checks.checks() if not check.of_cases for argument in check.arguments}
        assert {"tally", "group_lists", "group_answers", "size_answers"} <= others
        assert set() == others & {"outcome", "reading", "twins"}

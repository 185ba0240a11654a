"""`compare`, `--against` and runs: what passed must go on passing, and what was judged be judged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moe_conformance import spec
from moe_conformance.report import matrix
from moe_conformance.report.comparison import compare
from moe_conformance.report.problems import of_whole
from moe_conformance.report.records import Record
from moe_conformance.report.standing import in_words, places, standings
from moe_conformance.waiving import Waivers
from self_tests.plugin import plugin_runs
from self_tests.plugin.plugin_runs import PROJECT, TOY
from self_tests.plugin.test_floors import BFLOAT16, FLOAT32, PLACE, record


class TestStanding:
    def test_a_place_comes_to_its_worst_verdict(self) -> None:
        """All cases count, of those that passed the largest error; places come from requirement, variant and layout."""
        records = [record("pass", worst=0.25), record("pass", workload="uneven", worst=0.5), record("refused", "ep4")]
        found = standings([*records, record("waived", workload="odd", worst=9.0)])
        stands = found[PLACE]
        assert ("waived", 3, 3, 0.5) == (stands.verdict, stands.judged, stands.cases, stands.worst)
        assert (2, {"pass": 2, "waived": 1}) == (stands.passed, stands.count)
        assert "refused" == found["EXCH-01", "alltoall", "ep4"].verdict
        assert set(found) == places(records)
        assert "EXCH-01, alltoall on ep2" == in_words(PLACE)

    def test_what_passed_is_counted_by_trait(self) -> None:
        """By dtype, K and conditions; whether rows are moved is no trait to count by."""
        records = [record("pass", traits=BFLOAT16), record("pass", workload="odd", traits=FLOAT32)]
        found = standings([*records, record("refused", workload="even-2", traits=FLOAT32)])
        assert {"bfloat16": 1, "float32": 1, "K=2": 2, "uneven T": 1} == found[PLACE].traits

    def test_a_failure_under_another_requirement_is_told_in_all_places_of_its_check(self) -> None:
        """A crash is reported under EXCH-09, and is not missing among the cases of EXCH-01."""
        crash = replace(record("crash", workload="odd"), requirements=("EXCH-09",))
        found = standings([record("pass"), crash])
        assert (1, 1, 2) == (found[PLACE].passed, found[PLACE].told, found[PLACE].reached)
        assert (0, 1) == (found["EXCH-09", "alltoall", "ep2"].passed, found["EXCH-09", "alltoall", "ep2"].told)


class TestCompare:
    def test_each_change_has_its_name(self) -> None:
        """New failures and what is no longer judged are regressions, the rest is told."""
        old = {
            "ep2": record("pass"), "ep4": record("pass", "ep4"), "single": record("fail", "single"),
            "ep2-edp2": record("refused", "ep2-edp2"), "ep2-etp2": record("pass", "ep2-etp2", worst=0.1),
        }  # fmt: skip
        new = {
            "ep2": record("fail"), "ep4": record("not adapted", "ep4"), "single": record("pass", "single"),
            "ep2-edp2": record("pass", "ep2-edp2"), "ep2-etp2": record("pass", "ep2-etp2", worst=0.3),
        }  # fmt: skip
        found = compare(standings(old.values()), standings(new.values()), whole=True)
        told = {name: [change.place[2] for change in changes] for name, changes in vars(found).items()}
        assert {
            "new_failures": ["ep2"],
            "no_longer_judged": ["ep4"],
            "fewer_pass": [],
            "mended": ["single"],
            "newly_judged": ["ep2-edp2"],
            "errors_grew": ["ep2-etp2"],
        } == told
        assert found.regressed
        assert "EXCH-01, alltoall on ep2-etp2: 0.1 of the allowed error -> 0.3 of the allowed error" in "\n".join(
            found.lines()
        )

    def test_fewer_that_pass_are_a_regression(self) -> None:
        """Of all, or of a trait, though the place passes; not where the run was narrowed, and not what fails."""
        old = [record("pass", traits=FLOAT32), record("pass", workload="odd", traits=BFLOAT16)]
        new = [old[0], record("not adapted", workload="odd", traits=BFLOAT16)]
        found = compare(standings(old), standings(new), whole=True)
        fell = "2 pass, 2 K=2, 1 bfloat16, 1 uneven T -> 1 pass, 1 K=2, 0 bfloat16, 0 uneven T"
        assert [f"EXCH-01, alltoall on ep2: {fell}"] == [str(change) for change in found.fewer_pass]
        assert found.regressed
        assert found.sentence("old") == f"worse than old in 1 places: EXCH-01, alltoall on ep2: {fell}"
        other = compare(standings(old), standings([old[0], record("pass", traits=FLOAT32)]), whole=True)
        assert ["1 bfloat16, 1 uneven T"] == [change.before for change in other.fewer_pass]
        assert not compare(standings(old), standings(new), whole=True, counts=False).regressed
        failing = compare(standings(old), standings([old[0], record("fail", workload="odd")]), whole=True)
        assert (1, 0) == (len(failing.new_failures), len(failing.fewer_pass))
        assert "" == compare(standings(new), standings(old), whole=True).sentence("old")

    def test_nothing_differs(self) -> None:
        """A run is as good as itself; what a part does not have is not compared."""
        stands = standings([record("pass")])
        assert ["nothing differs"] == list(compare(stands, stands, whole=True).lines())
        assert not compare(stands, {}, whole=False).regressed
        assert compare(stands, {}, whole=True).regressed


class TestSpread:
    NOTHING = Waivers(None)

    def judged(self, *records: Record, spread: bool = True, strict: bool = False) -> list[str]:
        """Return what fails a whole run."""
        return list(of_whole(records, self.NOTHING, filtered=False, full=False, strict=strict, spread=spread))

    def test_several_ranks_without_expert_parallelism_are_not_green(self) -> None:
        """Unless an exchange or a layer was judged on ep > 1, or the adapter says that it has a single rank."""
        (problem,) = self.judged(record("pass", "single"), record("refused", "ep2", traits=FLOAT32))
        assert problem.startswith("no exchange and no layer was judged on a layout with ep > 1")
        moved = record("pass", "tp2-ep2-edp2", traits=FLOAT32)
        assert [] == self.judged(record("pass", "single"), moved)
        assert [] == self.judged(record("pass", "single"), record("refused", "ep2"), spread=False)

    def test_routers_beside_an_exchange_that_refuses_ep_are_not_enough(self) -> None:
        """Nor are losses and rules on a layout of that name: they move no rows."""
        router = [record("pass", "ep2", f"route-{n}", traits=("float32", "K=2")) for n in range(3)]
        (problem,) = self.judged(
            record("pass", "single", traits=FLOAT32), record("not adapted", traits=FLOAT32), *router
        )
        assert problem.endswith("; 3 checks of routers, losses or rules on such layouts move no rows")

    def test_a_failure_is_told_once(self) -> None:
        """That nothing passed is no news where something failed."""
        assert ["no check passed"] == self.judged(record("refused", "ep2"))
        assert [] == self.judged(record("fail", "ep2"))

    def test_exclusions_fail_under_strict(self) -> None:
        """A value that was judged nowhere, and a limit that nothing proves; a refusal of the library is proved."""
        kept = record("pass", traits=FLOAT32), record("refused", "single", traits=BFLOAT16)
        assert [] == self.judged(*kept, strict=True)
        for verdict in ("not adapted", "limit"):
            excluded = record(verdict, workload="odd", traits=BFLOAT16)
            assert [] == self.judged(*kept, excluded)
            (problem,) = self.judged(*kept, excluded, strict=True)
            assert problem.startswith("--strict allows no exclusion that nothing proves; by its own word not: bfloat16")


WORSE = f"""
from moe_conformance.contract import Unsupported
from {TOY.partition(":")[0]} import Toy, ToySession

class WorseSession(ToySession):
    def exchange(self, config):
        if self.topology.sizes["world"] > 1:
            raise Unsupported("expert parallelism is gone")
        return super().exchange(config)

class Worse(Toy):
    variants = ("right",)
    session_class = WorseSession

class Single(Worse):
    single_rank = True
"""
TWO_CHECKS = '''
"""Two checks of one place."""
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ExchangeStep

def even(workload):
    return workload.name == "even"

@requirement("EXCH-05", run=ExchangeStep(), when=even)
def test_outputs(reading, tally):
    """The output is right."""
    judge_outputs(reading, tally)

@requirement("EXCH-05", run=ExchangeStep(), when=even)
def test_again(reading, tally):
    """It is right again."""
    judge_outputs(reading, tally)
'''
SHOULD = '''
"""A check of a SHOULD."""
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ExchangeStep

def even(workload):
    return workload.name == "even"

@requirement("COST-05", run=ExchangeStep(), when=even)
def test_cost(reading, tally):
    """It fails where the output is wrong."""
    judge_outputs(reading, tally)
'''


class TestRuns:
    def judged(self, folder: Path, backend: str, *arguments: str, checks: str = str(PROJECT)) -> plugin_runs.Finished:
        """Judge a toy on two ranks."""
        given = ("--moe-backend", backend, "--moe-ranks", "2", *arguments)
        return plugin_runs.pytest_on(*given, "-o", "python_files=checks.py", checks, cwd=folder)

    def test_what_is_judged_no_more_is_a_regression(self, tmp_path: Path) -> None:
        """With --against, and by `compare`: the run of an adapter that refuses what it had fails."""
        (tmp_path / "worse.py").write_text(WORSE)
        assert 0 == self.judged(tmp_path, TOY, "-k", "right", "--moe-report", "old").status
        done = self.judged(tmp_path, "worse:Worse", "--moe-against", "old", "-k", "right", "--moe-report", "new")
        assert 1 == done.status
        assert "worse than old in 2 places: EXCH-05, right on ep2: pass -> not adapted" in done.output
        compared = plugin_runs.cli("compare", "old", "new", "--json", cwd=tmp_path)
        assert 1 == compared.status
        assert ["EXCH-05", "EXCH-09"] == [each["place"][0] for each in json.loads(compared.output)["no_longer_judged"]]
        assert 0 == plugin_runs.cli("compare", "new", "old", cwd=tmp_path).status
        missing = plugin_runs.cli("compare", "old", "nowhere", cwd=tmp_path)
        assert (2, True) == (missing.status, "there is no report in nowhere" in missing.output)

    @pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
    def test_a_place_of_which_a_part_ran_is_not_held(self, tmp_path: Path, workers: tuple[str, ...]) -> None:
        """What `-k` or a node id leaves out is not known to be worse, also where workers selected."""
        (tmp_path / "worse.py").write_text(WORSE)
        checks = tmp_path / "folder"
        checks.mkdir()
        (checks / "checks.py").write_text(TWO_CHECKS)
        assert 0 == self.judged(tmp_path, TOY, "-k", "right", "--moe-report", "old", checks=str(checks)).status
        held = ("--moe-against", "old", *workers)
        whole = self.judged(tmp_path, "worse:Worse", "-k", "right", *held, checks=str(checks))
        assert "worse than old in 1 places: EXCH-05, right on ep2: pass -> not adapted" in whole.output
        part = self.judged(tmp_path, "worse:Worse", "-k", "again and right", *held, checks=str(checks))
        assert "1 not adapted" in part.output
        assert "worse than" not in part.output
        item = f"{checks}/checks.py::test_again[right-ep2-even]"
        assert "worse than" not in self.judged(tmp_path, "worse:Worse", *held, checks=item).output

    def test_a_refusal_of_all_expert_parallelism_is_not_green(self, tmp_path: Path) -> None:
        """Though nothing failed; an adapter of a single rank says so, and passes."""
        (tmp_path / "worse.py").write_text(WORSE)
        done = self.judged(tmp_path, "worse:Worse")
        assert 1 == done.status
        assert "no exchange and no layer was judged on a layout with ep > 1" in done.output
        assert 0 == self.judged(tmp_path, "worse:Single").status

    def test_a_should_fails_under_strict_alone(self, tmp_path: Path) -> None:
        """It is told as not kept, and does not change the exit status."""
        (tmp_path / "checks.py").write_text(SHOULD)
        done = self.judged(tmp_path, TOY, "-k", "wrong", checks=str(tmp_path))
        assert 1 == done.status
        assert "FAILS THE RUN: no check passed" in done.output
        done = self.judged(tmp_path, TOY, "-k", "wrong or right", "--moe-report", "told", checks=str(tmp_path))
        verdicts = plugin_runs.verdicts(plugin_runs.result(tmp_path / "told"))
        assert "not kept" == verdicts["test_cost[wrong-ep2-even]"]
        assert (0, "2 not kept") == (done.status, "2 not kept" if "2 not kept" in done.output else done.output)
        done = self.judged(tmp_path, TOY, "-k", "wrong or right", "--moe-strict", checks=str(tmp_path))
        assert 1 == done.status


class TestTold:
    def test_a_mixed_cell_says_its_share(self) -> None:
        """Of its cases, those that were judged in percent; a whole one and a failing one say nothing of that."""
        records = [record("pass"), *(record("refused", workload=f"w{n}") for n in range(3)), record("pass", "ep4")]
        asked = [spec.load()["EXCH-01"]]
        shown = matrix.matrix(asked, ["ep2", "ep4"], records, width=80, color=False, encoding="utf-8")
        (row,) = [line for line in shown.splitlines() if "EXCH-01" in line]
        assert ["EXCH-01", "✓", "25%", "✓"] == row.split()

    def test_how_much_was_judged_and_waived(self) -> None:
        """Of what was asked for and of all there is; of a requirement, the waived cases of those judged."""
        waived = replace(record("waived", workload="odd"), waiver="W-1")
        records = [record("pass"), waived, record("refused", "ep4")]
        assert "judged 1 of 2 requirements asked for, of 336 in all" == matrix.judged(
            records, ["EXCH-01", "EXCH-02"], 336
        )
        assert "waived, of the cases judged: EXCH-01 1 of 2 (W-1)" == matrix.waived(records)
        assert "" == matrix.waived([record("pass")])

"""What a run tells on the screen: progress, failures as they happen and at the end, why cases were not judged."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from moe_conformance import spec
from moe_conformance.plugin.stopping import Stopping
from moe_conformance.report import unjudged, words
from moe_conformance.report.live import Live
from moe_conformance.report.progress import Progress
from moe_conformance.report.records import PROPERTY
from self_tests.plugin.plugin_runs import record

SPEC = spec.load()


class TestWords:
    def test_a_crash_is_one_kind_on_every_check_and_rank(self) -> None:
        """The requirement, the rank, the operation, addresses and who else failed do not make another kind."""
        crashes = [
            record("EXCH-01", "crash", message="run: rank 0 raised in build: OSError: at 0x7f; so did rank 1"),
            record("EXCH-02", "crash", message="run: rank 3 raised in build: OSError: at 0x8e; so did rank 1, 2"),
            record("EXCH-02", "crash", message="run: rank 3 raised in forward:0: OSError: at 0x8e"),
            record("EXCH-02", "crash", message="run: run with a second backward, rank 3 raised in open: OSError: at 1"),
            record("EXCH-02", "crash", message="run: rank 3 raised in open: ValueError: at 1"),
        ]
        assert [4, 1] == [len(group.records) for group in words.groups(crashes)]

    def test_values_fail_by_requirement_and_kind(self) -> None:
        """Two requirements are two kinds, and two types of mismatch under one requirement are."""
        records = [
            record("EXCH-01", "fail", kind="WrongDelivery"),
            record("EXCH-01", "fail", "ep4", kind="WrongDelivery"),
            record("EXCH-01", "fail", kind="WrongCount"),
            record("EXCH-02", "fail", kind="WrongDelivery"),
            record("EXCH-02", "pass"),
        ]
        assert [2, 1, 1] == [len(group.records) for group in words.groups(records)]

    def test_what_must_be_comes_before_what_should_be(self) -> None:
        """Crashes and hangs come first; of one level the kind with the most cases."""
        should = next(each.id for each in SPEC.values() if each.level == "SHOULD")
        records = [record(should, "fail", layout) for layout in ("ep2", "ep4", "single")]
        records += [record("EXCH-01", "fail"), record("EXCH-02", "fail"), record("EXCH-02", "fail", "ep4")]
        records += [record(should, "hang"), record("EXCH-09", "crash")]
        told = [(group.first.verdict, group.first.requirements[0]) for group in words.groups(records)]
        failures = [("fail", "EXCH-02"), ("fail", "EXCH-01"), ("fail", should)]
        assert [("crash", "EXCH-09"), ("hang", should), *failures] == told

    def test_only_the_first_kinds_are_told_in_full(self) -> None:
        """The others have one line each, so that nothing is left out."""
        many = [record(each, "fail", message=f"told {each}") for each in list(SPEC)[:9]]
        told = words.texts(words.groups(many), "again")
        assert words.IN_FULL + 1 == len(told)
        title, text = told[-1]
        assert "4 more kinds of failure" == title
        assert 4 == len(text.splitlines())
        assert all("reproduce: again --only" in full for _, full in told[:-1])


class TestNotKept:
    def test_each_requirement_has_a_line(self) -> None:
        """Most cases first, with the words of its first case and each claim that one of its cases names."""
        hint = "; a backend that sends every rank's capacity to every expert by design claims wire = 'capacity'"
        long = f"run: dispatch:0 moves {'1' * 200} rows"
        records = [
            record("COST-01", "not kept", message="SHOULD, not kept: run: rank 0 calls all_reduce"),
            record("COST-03", "not kept", message=f"SHOULD, not kept: {long}"),
            record("COST-03", "not kept", "ep4", message=f"SHOULD, not kept: run: dispatch:0 moves 16 rows{hint}"),
            record("EXCH-01", "fail", message=f"run: dispatch:0 moves 16 rows{hint}"),
        ]
        assert [
            f"SHOULD, not kept: COST-03 in 2 cases: {long[:157]}...{hint}",
            "SHOULD, not kept: COST-01 in 1 case: run: rank 0 calls all_reduce",
        ] == words.not_kept(records)
        assert [] == words.not_kept(records[3:])

    def test_a_claim_is_told_once(self) -> None:
        """Not in the words of the first case and behind them."""
        message = (
            "dispatch: 8 rows; one that pads claims handed = 'batched'; one that is static claims handed = 'static'"
        )
        (line,) = words.not_kept([record("COST-10", "not kept", message=f"SHOULD, not kept: {message}")])
        assert f"SHOULD, not kept: COST-10 in 1 case: {message}" == line

    def test_a_claim_that_all_cases_name_stands_alone(self) -> None:
        """Another, which fits some of them by chance, is left out."""
        static = "; a backend that is static claims handed = 'static'"
        told = [f"dispatch: 8 rows; a backend that pads claims handed = 'batched'{static}", f"dispatch: 9 rows{static}"]
        (line,) = words.not_kept([record("COST-10", "not kept", message=message) for message in told])
        assert f"SHOULD, not kept: COST-10 in 2 cases: dispatch: 8 rows{static}" == line

    def test_there_are_twenty_lines_at_most(self) -> None:
        """The last one names the others."""
        many = [record(each, "not kept") for each in list(SPEC)[:25]]
        lines = words.not_kept(many)
        assert 20 == len(lines)
        assert f"6 more SHOULD requirements not kept: {', '.join(list(SPEC)[19:25])}" == lines[-1]
        assert 20 == len(words.not_kept(many[:20]))


class TestLive:
    def test_the_first_failure_of_a_kind_is_told(self) -> None:
        """With what was required and the command; a second one of the kind, and a pass, are not told."""
        live = Live("again")
        first = record("EXCH-01", "fail", message="rank 0 token 1 was not delivered", kind="WrongDelivery")
        expected = (
            "EXCH-01: fail",
            first.item,
            first.message,
            f"EXCH-01: {SPEC['EXCH-01'].sentence}",
            f"reproduce: {first.reproduce('again')}",
        )
        assert expected == live.lines(first)
        assert () == live.lines(replace(first, layout="ep4"))
        assert () == live.lines(record("EXCH-02", "pass"))
        assert {words.kind(first)} == live.shown

    def test_a_run_in_which_all_fails_is_not_a_screen_of_each(self) -> None:
        """After ten kinds the others are left to the end, and a line says so."""
        live = Live("again")
        told = [live.lines(record(each, "fail", message="wrong")) for each in list(SPEC)[:12]]
        assert [True] * 10 + [False] * 2 == [bool(lines) for lines in told]
        assert "further kinds of failure are shown at the end" == told[9][-1]
        assert 10 == len(live.shown)

    def test_what_was_told_is_told_without_its_detail(self) -> None:
        """The traceback of a crash is printed once."""
        crash = record("EXCH-09", "crash", message="rank 0 raised", detail="Traceback")
        (_, whole), (_, short) = (words.texts(words.groups([crash]), "again", t)[0] for t in ((), {words.kind(crash)}))
        assert ["Traceback" in whole, "Traceback" in short] == [True, False]


class TestStopping:
    def told(self, *messages: str) -> Stopping:
        """Return what has seen hangs with these messages."""
        config = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=lambda name: None), add_cleanup=lambda f: f())
        stopping = Stopping(config, 0.0)  # type: ignore[arg-type]
        for number, message in enumerate(messages):
            hung = replace(record("EXCH-09", "hang", message=message), workload=f"w{number}")
            stopping.pytest_runtest_logreport(SimpleNamespace(user_properties=[(PROPERTY, hung)]))  # type: ignore[arg-type]
        return stopping

    def test_the_third_hang_alike_ends_the_run(self) -> None:
        """Where each took all of its deadline; the ranks' numbers and the seconds do not make another hang."""
        slow = [f"rank {n} hung in build: no answer within {n + 60}.0 s: in compile, from a.py:3" for n in range(3)]
        assert "" == self.told(*slow[:2], "rank 0 hung: no answer within 60.0 s: in wait, from a.py:4").reason
        assert self.told(*slow).reason.startswith("3 cases hang alike, each until its deadline")

    def test_a_hang_that_was_proved_costs_little(self) -> None:
        """Such cases go on to the limit of all hangs."""
        assert "" == self.told(*["rank 0 waits in a collective that cannot complete"] * 5).reason


class TestUnjudged:
    RECORDS = (
        record("EXCH-01", "refused", message="refused by the library: no buffer of 10 rows"),
        record("EXCH-02", "refused", message="refused by the library: no buffer of 12 rows"),
        *(record("EXCH-01", "not adapted", message=f"not adapted: {why}") for why in "abbccdd"),
        record("EXCH-01", "pass", message="not adapted: nothing"),
        record("EXCH-01", "not applicable", message="not applicable: ep4 is a layout of 4 ranks, and --ranks is 2"),
    )

    def test_what_is_not_applicable_by_design_is_one_line(self) -> None:
        """It is counted with its reason; layouts of more ranks than there are stay out of the list."""
        design = record("EXCH-01", "not applicable", message="not applicable by design: experts are never split")
        assert ["3 not applicable by design: experts are never split"] == list(
            unjudged.lines([design] * 3, whole=False)
        )

    def test_reasons_are_counted(self) -> None:
        """Reasons that differ in numbers are one; the rarest are left out and counted."""
        first = ["2 refused: no buffer of 10 rows", "2 not adapted: b", "2 not adapted: c"]
        rest = "3 not adapted for 2 other reasons; --matrix all shows them"
        assert [*first, rest] == list(unjudged.lines(self.RECORDS, whole=False))
        assert [*first, "2 not adapted: d", "1 not adapted: a"] == list(unjudged.lines(self.RECORDS, whole=True))


class TestProgress:
    def test_one_line_that_is_left_empty(self) -> None:
        """The line fits the terminal, counts what ended, and is gone at the end."""
        lines: list[str] = []
        progress = Progress.on_terminal(lines.append, 40, total=2)
        progress._shown = 0.0
        progress.step("alltoall-ep2-a-workload-with-a-long-name", failed=True, runs=1)
        progress.clear()
        assert [39, 39] == [len(line) for line in lines]
        assert lines[0].startswith("1/2 checks, 1 failed, ")
        assert "" == lines[1].strip()

    def test_a_log_gets_a_line_every_minute(self) -> None:
        """A short run writes none, a long one a line that is not cut; at the end there is nothing to clear."""
        lines: list[str] = []
        progress = Progress.in_log(lines.append, total=3)
        progress.step("alltoall-ep2-first", failed=False, runs=1)
        assert [] == lines
        progress._shown -= 61
        progress._started -= 61
        progress.step("alltoall-ep2-a-workload-with-a-long-name", failed=True, runs=1)
        progress.step("alltoall-ep2-third", failed=False, runs=1)
        progress.clear()
        assert 1 == len(lines)
        assert lines[0].startswith("2/3 checks, 1 failed, 0 cases/s, about 3")
        assert lines[0].endswith("  alltoall-ep2-a-workload-with-a-long-name")

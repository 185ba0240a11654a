"""What cannot run gets one sentence with the remedy, exit status 2 and no traceback; other runs are left alone."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from moe_conformance.plugin import options
from moe_conformance.plugin.options import Options, Unusable
from moe_conformance.plugin.run import prepare
from self_tests.plugin import plugin_runs
from self_tests.plugin.plugin_runs import TOY

TOYS = TOY.partition(":")[0]
RIGHT = f"{TOYS}:RightToy"

UNUSABLE = {
    "unknown backend": ({"backend": "megatorn"}, r"unknown backend 'megatorn'; known: .*native.*pkg\.mod:Class"),
    "module that is not there": ({"backend": "nowhere.at_all:Backend"}, "does not import"),
    "name that is not there": ({"backend": f"{TOYS}:Tyo"}, "has no Tyo"),
    "class that is no backend": (
        {"backend": "json:JSONDecoder"},
        "is no backend: it lacks .*versions.*/contract",
    ),
    "class that cannot be made": ({"backend": "pathlib:PurePath.with_name"}, "is no backend"),
    "missing library": ({"backend": f"{TOYS}:NeedyToy"}, "toylib is not installed: pip install toylib"),
    "no ranks": ({"ranks": "0"}, "no layout fits 0 ranks; give --ranks 1 to 64"),
    "fewer than none": ({"ranks": "-1"}, "no layout fits -1 ranks"),
    "more ranks than are checked": ({"ranks": "65"}, "no layout fits 65 ranks"),
    "ranks that are no number": ({"ranks": "four"}, "--ranks needs a number, not 'four'"),
    "unknown profile": ({"profile": "slow"}, "unknown profile 'slow'; give quick or full"),
    "no part": ({"rotation": "4/3"}, "--rotation needs I/N with I from 1 to N, such as 2/3, not '4/3'"),
    "part of nothing": (
        {"rotation": "1/3", "profile": "virtual", "ranks": "64"},
        "the profile virtual leaves nothing out",
    ),
    "part of smoke": ({"rotation": "1/3", "profile": "smoke"}, "what the profile smoke leaves out is in quick"),
    "unknown device": ({"device": "tpu"}, "unknown device 'tpu'; give cpu or cuda"),
    "unknown requirement": ({"only": "EXCH-01,EXCH-77"}, "no requirement EXCH-77; .*list requirements"),
    "unknown plant": ({"plant": "no-such-bug"}, "unknown plant 'no-such-bug'; known: .*swapped-sources"),
    "plant in a real backend": ({"plant": "unweighted", "backend": "torchtitan"}, "planted in native"),
    "folder that cannot be written": ({"report": "/proc/report"}, "/proc/report cannot be written"),
    "waivers that are not there": ({"waivers": "nowhere.toml"}, "waivers nowhere.toml cannot be used: it cannot"),
}


class TestPrepare:
    @pytest.mark.parametrize(("given", "sentence"), UNUSABLE.values(), ids=UNUSABLE.keys())
    def test_one_sentence_says_what_and_what_to_do(self, given: dict[str, Any], sentence: str) -> None:
        """Everything that can be known before a rank starts is known then."""
        with pytest.raises(Unusable, match=sentence) as raised:
            prepare(options.from_mapping(given))
        assert "\n" not in str(raised.value)

    def test_cuda_without_a_gpu(self) -> None:
        """A device that is not there is an error of usage."""
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU here")
        with pytest.raises(Unusable, match="no GPU; take --device cpu"):
            prepare(Options(device="cuda"))

    def test_what_is_usable_is_prepared(self) -> None:
        """The backend is loaded and tells its versions; no rank is started."""
        run = prepare(Options())
        assert "native" == run.backend.name
        assert {"torch"} == set(run.versions)


class TestOptions:
    def test_a_command_repeats_what_differs_from_the_defaults(self) -> None:
        """The report folder and the requirements are not part of it."""
        given = Options(backend="torchtitan", ranks=2, only="EXCH-01,EXCH-02", report="there")
        assert "moe-conformance run --backend torchtitan --ranks 2" == given.again
        assert "moe-conformance run --backend native" == Options().again
        assert "moe-conformance run --plant unweighted" == Options(plant="unweighted").again

    def test_a_list_may_be_given_in_several_options(self) -> None:
        """None of them is dropped."""
        assert ("EXCH-01", "EXCH-02", "GRAD-01") == options.from_mapping({"only": ["EXCH-01,EXCH-02", "GRAD-01"]}).ids


class TestExitStatus:
    def test_the_command_line_gives_2(self, tmp_path: Path) -> None:
        """The sentence, and nothing else."""
        done = plugin_runs.cli("run", "--backend", "megatorn", cwd=tmp_path)
        assert 2 == done.status
        assert 1 == len(done.output.split("\n\n")[0].splitlines())
        assert "Traceback" not in done.output

    def test_pytest_gives_its_own_usage_error(self, tmp_path: Path) -> None:
        """Plain pytest with the same options says the same, with the status that pytest has for it."""
        done = plugin_runs.pytest_on("--moe-ranks", "0", cwd=tmp_path)
        assert pytest.ExitCode.USAGE_ERROR == done.status
        assert "ERROR: no layout fits 0 ranks" in done.output

    def test_ranks_that_cannot_start_are_no_items_fault(self, tmp_path: Path) -> None:
        """A library that breaks while the ranks' parent imports it ends the run once, not once per item."""
        checks = str(plugin_runs.PROJECT / "checks.py")
        done = plugin_runs.pytest_on("--moe-backend", f"{TOYS}:UnpreloadableToy", checks, cwd=tmp_path)
        assert pytest.ExitCode.USAGE_ERROR == done.status
        assert 1 == done.output.count("the ranks cannot start: ")
        assert "no_such_module" in done.output

    def test_a_wrong_name_leaves_the_last_report_as_it_is(self, tmp_path: Path) -> None:
        """A slip of the pen costs no night's run."""
        checks = str(plugin_runs.PROJECT / "checks.py")
        asked = ("-q", "--moe-backend", RIGHT, "--moe-ranks", "1", "--moe-report", str(tmp_path))
        assert 0 == plugin_runs.pytest_on(*asked, "-k", "test_outputs", checks, cwd=tmp_path).status
        before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
        assert "result.json" in before
        done = plugin_runs.pytest_on(*asked, f"{checks}::test_otuputs", cwd=tmp_path)
        assert pytest.ExitCode.USAGE_ERROR == done.status
        assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}

    def test_nothing_needs_pytests_terminal(self, tmp_path: Path) -> None:
        """Without it nothing is printed, and the status tells."""
        checks = str(plugin_runs.PROJECT / "checks.py")
        asked = ("-p", "no:terminal", "--moe-backend", RIGHT, "--moe-ranks", "1", "-k", "test_outputs", checks)
        done = plugin_runs.pytest_on(*asked, cwd=tmp_path)
        assert (0, "") == (done.status, done.output)


class TestUnrelatedRun:
    def test_nothing_is_imported_and_nothing_changes(self, tmp_path: Path) -> None:
        """In another project's run there is no torch, no signal handler and no fixture of ours."""
        (tmp_path / "test_other.py").write_text(
            textwrap.dedent(
                """
                import signal
                import sys

                def test_light(pytestconfig):
                    assert pytestconfig.pluginmanager.hasplugin("moe_conformance")
                    heavy = {"torch", "rich", "click", "moe_conformance.spec", "moe_conformance.engine"}
                    assert set() == heavy & set(sys.modules)
                    assert signal.SIG_DFL == signal.getsignal(signal.SIGTERM)

                def test_own_fixture(outcome):
                    assert 3 == outcome
                """
            )
        )
        (tmp_path / "conftest.py").write_text("import pytest\n\n@pytest.fixture\ndef outcome():\n    return 3\n")
        done = plugin_runs.pytest_on("-q", "test_other.py", cwd=tmp_path)
        assert 0 == done.status
        assert "2 passed" in done.output
        assert "requirement" not in done.output

"""The pytest plug-in. It does nothing until an option is given or distributed_tests is collected.

Every pytest run of an environment in which the suite is installed imports this file, so it imports nothing heavy.

    collecting.py imports the checks under one name
    options.py    the options, for pytest and for the command line
    run.py        options, backend and waivers of a run, checked before it starts
    driver.py     what pytest collects, and the fixtures of checks that draw workloads or request groups
    case_items.py one item per case, and the checks in it
    case_run.py   from a case to the verdicts of its checks
    agenda.py     the order of items, and which cases follow an item
    outcomes.py   runs cases on ranks, ahead of the judge
    foreseeing.py the equivalent runs that checks will request
    repeating.py  repeats failures on new ranks
    trial.py      the verdict of an item that ended
    evidence.py   tracebacks, output and ledgers of a failed run
    recording.py  the record of a verdict, and what pytest shows of it
    factors.py    the size that a wrong factor equals
    drawing.py    how Hypothesis draws
    replay.py     runs a drawn example from a file
    launching.py  the processes of a launcher such as torchrun
    scheduling.py which cells run on which xdist worker
    roster.py     all selected items, so that those that never end are reported
    stopping.py   ends a run early
    scripts.py    writes scripts that reproduce failures without pytest
    reporter.py   makes progress, matrix, result.json and the exit status of records
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moe_conformance.plugin import collecting, launching, options

if TYPE_CHECKING:
    from moe_conformance.plugin.driver import Driver
    from moe_conformance.plugin.reporter import Reporter

_STOPPING = "moe-conformance-stopping"
_DRIVER = "moe-conformance-driver"
_REPORTER = "moe-conformance-reporter"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--moe-NAME` for every option of a run."""
    group = parser.getgroup("moe-conformance", "conformance of Mixture-of-Experts parallelism")
    for option in options.OPTIONS:
        dest = f"moe_{option.field}"
        if option.flag:
            group.addoption(f"--moe-{option.name}", dest=dest, help=option.help, action="store_true", default=None)
            continue
        group.addoption(
            f"--moe-{option.name}",
            dest=dest,
            metavar=option.metavar,
            help=option.help,
            action="append" if option.lists else "store",
            default=None,
        )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Under a launcher such as torchrun, take this process's part in the run, which only RANK 0's process drives."""
    option = config.option
    if not launching.is_launched() or hasattr(config, "workerinput") or option.help or option.version:
        return None
    return launching.join(config) if _takes_part(config) else None


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark; begin if an option was given."""
    config.addinivalue_line(
        "markers", "requirement(*ids, run, when): the requirements that a check decides, and on which workloads"
    )
    if any(value is not None for value in _given(config).values()):
        begin(config)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> None:
    """Begin when the suite's own checks are collected."""
    if file_path.suffix == ".py" and collecting.holds(file_path):
        begin(parent.config)


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the checks' folder as a folder: as a package it would be imported under another name."""
    return pytest.Dir.from_parent(parent, path=path) if collecting.holds(path) else None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Import checks under their own name, whichever path leads to them."""
    if not collecting.holds(module_path):
        return None
    return collecting.CheckModule.from_parent(parent, path=module_path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Begin in the controller, which collects nothing itself, when a worker has collected the suite's own checks."""
    config: pytest.Config = node.config
    files = {node_id.partition("::")[0] for node_id in ids}
    if any(collecting.holds(config.rootpath / file) for file in files):
        begin(config)
    reporter: Reporter | None = config.pluginmanager.get_plugin(_REPORTER)
    if reporter is not None:
        reporter.collected(node, ids)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the cases of a cell on one worker, so that no case runs twice; leave any other distribution alone."""
    driver: Driver | None = config.pluginmanager.get_plugin(_DRIVER)
    if driver is None or config.getoption("dist") != "load":
        return None
    from moe_conformance.plugin.scheduling import by_cell

    return by_cell(config, log, driver.plan.cells)


def begin(config: pytest.Config) -> None:
    """Prepare the run and register its parts, once.

    Raises:
        pytest.UsageError: the run cannot start; says why and what to do.
    """
    manager = config.pluginmanager
    if manager.hasplugin(_DRIVER):
        return
    from moe_conformance.plugin import drawing
    from moe_conformance.plugin.driver import Driver
    from moe_conformance.plugin.reporter import Reporter
    from moe_conformance.plugin.run import prepare
    from moe_conformance.plugin.stopping import Stopping
    from moe_conformance.report.folder import Hold, InUse

    try:
        given = launching.with_ranks(config, _given(config))
        driver = Driver(prepare(options.from_mapping(given), launching.site_of(config)))
        run_options = driver.run.options
        if run_options.report and not hasattr(config, "workerinput"):  # xdist: the controller writes
            config.add_cleanup(Hold(Path(run_options.report)).release)
    except (options.Unusable, InUse) as error:
        raise pytest.UsageError(str(error)) from None
    if config.getoption("--hypothesis-profile", None) is None:
        drawing.load_profile(run_options.profile)
    stopping = Stopping(config, run_options.time_limit)
    manager.register(driver, _DRIVER)
    if not hasattr(config, "workerinput"):  # xdist: the controller reports what the workers judge
        manager.register(Reporter(driver, stopping, config), _REPORTER)
    manager.register(stopping, _STOPPING)  # last, so that its hooks are first


def _takes_part(config: pytest.Config) -> bool:
    """Whether an option or the path of checks was given."""
    return any(value is not None for value in _given(config).values()) or collecting.are_named(config)


def _given(config: pytest.Config) -> dict[str, Any]:
    return {option.field: config.getoption(f"moe_{option.field}", None) for option in options.OPTIONS}

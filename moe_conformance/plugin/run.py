"""The options, the backend with its versions, and the waivers of a run, all checked before it starts."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from moe_conformance import spec
from moe_conformance import waiving as waivers
from moe_conformance.backends import registry
from moe_conformance.backends.library import Library
from moe_conformance.contract import Backend, Unsupported
from moe_conformance.engine.gpu.slices import Slice, share, visible
from moe_conformance.engine.hosts import Cluster
from moe_conformance.goldens import stored_values
from moe_conformance.plugin.options import Options, Unusable
from moe_conformance.report import floor, floor_file, result
from moe_conformance.spec.places import checked
from moe_conformance.workloads import golden
from moe_conformance.workloads.scripts import layout_names, workload_names

PLANTS = "self_tests.planted_bugs"


@dataclass(frozen=True)
class Run:
    """A run of one backend. `target` is what the ranks load: a registered name or pkg.mod:Class.

    `site` is where ranks run, None for this machine only.
    """

    options: Options
    target: str
    backend: Backend
    versions: Mapping[str, str]
    waivers: waivers.Waivers
    started: datetime
    site: Cluster | None = None
    floor: floor.Floor | None = None
    against: result.Report | None = None


def prepare(options: Options, site: Cluster | None = None) -> Run:
    """Check everything that can be checked without starting a rank.

    Raises:
        Unusable: unknown backend, plant or requirement; no backend at all; a library or a GPU that is not there; a
            backend that virtual ranks cannot run; waivers or goldens that cannot be read; a report folder that cannot
            be written.
    """
    if unknown := [wanted for wanted in options.ids if wanted not in spec.load()]:
        raise Unusable(f"no requirement {', '.join(unknown)}; `moe-conformance list requirements` shows all of them")
    if unchecked := [wanted for wanted in options.ids if wanted not in checked()]:
        why = spec.load()[unchecked[0]].without_check
        raise Unusable(f"{unchecked[0]} has no check yet" + (f": {why}" if why else ""))
    target = planted(options.plant) if options.plant else options.backend
    backend, versions = open_backend(target, options.library)
    _require_device(options.device)
    _require_bounded_limits(target, backend)
    if options.profile == "virtual" and getattr(backend, "process_per_rank", False):
        raise Unusable(f"{target} keeps per-rank state in module globals, which virtual ranks share")
    names = waivers.Names(
        requirements=frozenset(spec.load()),
        variants=frozenset(backend.variants),
        layouts=frozenset(layout_names()),
        workloads=workload_names(),
        versions=versions,
    )
    try:
        held = waivers.load(waivers.path_for(target, options.waivers), names, date.today())
    except waivers.Unreadable as error:
        raise Unusable(str(error)) from error
    try:
        stored_values.read(stored_values.folder(), golden.CHAPTER)
    except stored_values.GoldenError as error:
        raise Unusable(f"the goldens cannot be used: {error}") from error
    if options.report:
        _require_writable(Path(options.report))
    try:
        floors = () if options.plant else floor_file.of_backend(target)
        lowest = floor.chosen(floors, versions, options.device, options.profile)
        against = result.read(Path(options.against)) if options.against else None
    except (floor_file.Unreadable, result.NoReport) as error:
        raise Unusable(str(error)) from error
    return Run(options, target, backend, versions, held, datetime.now(UTC), site, lowest, against)


def open_backend(target: str, checkout: str = "") -> tuple[Backend, Mapping[str, str]]:
    """Return a backend and its versions; the library under test is not imported here.

    Args:
        target: A registered name or pkg.mod:Class.
        checkout: A folder that precedes all others from which modules are imported, here and on the ranks; "" is none.

    Raises:
        Unusable: there is no such backend, it is none, it cannot be made, or its library is not installed; the checkout
            is no folder, or the library is not in it.
    """
    if checkout:
        _put_in_front(checkout)
    try:
        backend = registry.load(target)
        versions = dict(backend.versions())
    except registry.NoBackend as error:
        raise Unusable(str(error)) from error
    except Unsupported as error:
        raise Unusable(f"backend {target} cannot run here: {error}") from error
    except Exception as error:
        raise Unusable(f"backend {target} cannot be created: {type(error).__name__}: {error}") from error
    if not backend.variants:
        raise Unusable(f"backend {target} has no variants; name at least one, such as 'default'")
    library: Library | None = getattr(backend, "library", None)
    if checkout and library is not None and library.folder() != Path(checkout).resolve():
        raise Unusable(f"there is no {library.module} in {checkout}; give the folder from which it is imported")
    return backend, versions


def _put_in_front(checkout: str) -> None:
    """Make modules in a folder precede those of the same name elsewhere; ranks get `sys.path` from this process."""
    folder = Path(checkout).resolve()
    if not folder.is_dir():
        raise Unusable(f"--library {checkout} is no folder; give a checkout of the library")
    if str(folder) not in sys.path[:1]:
        sys.path.insert(0, str(folder))


def planted(name: str) -> str:
    """Return the dotted path of native with a planted bug.

    Raises:
        Unusable: there is no such plant, or the planted bugs are not here.
    """
    try:
        bugs = importlib.import_module(PLANTS)
    except ModuleNotFoundError as error:
        if not PLANTS.startswith(error.name or "?"):
            raise
        raise Unusable("the planted bugs come with the source checkout, not with the wheel") from error
    found: dict[str, str] = {plant.name: plant.backend for plant in (*bugs.plants(), *bugs.plants_of_many_ranks())}
    if name not in found:
        raise Unusable(f"unknown plant {name!r}; known: {', '.join(found)}")
    return found[name]


def engine_needs(backend: Backend) -> dict[str, Any]:
    """Return the modules that the engine imports before it forks ranks, and their environment variables."""
    scenarios = ("moe_conformance.scenarios.moe_step", "moe_conformance.scenarios.group_lists")
    preload = (*scenarios, *getattr(backend, "preload", ()))
    # cuBLAS is deterministic only with it, and looks for it once in a process.
    workspace = {"CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")}
    environment = {**workspace, **gpu_environment(), **getattr(backend, "environment", {})}
    return {"preload": preload, "environment": environment}


def gpu_environment() -> dict[str, str]:
    """Return the variables that give the ranks of an xdist worker their GPUs; nothing outside of a worker."""
    name, workers = os.environ.get("PYTEST_XDIST_WORKER", ""), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "")
    number = name.removeprefix("gw")
    if not (number.isdecimal() and workers.isdecimal()):
        return {}
    slice_ = _slice(int(workers), int(number))
    return {"CUDA_VISIBLE_DEVICES": slice_.variable} if slice_.devices else {}


def gpu_sentences(workers: int) -> list[str]:
    """Return a sentence for every xdist worker: the GPUs of its ranks."""
    return [_slice(workers, number).words for number in range(workers)]


def _slice(workers: int, number: int) -> Slice:
    import torch  # heavy

    return share(visible(os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()), number, workers)


def _require_bounded_limits(target: str, backend: Backend) -> None:
    """Raise Unusable if a variant excludes all of ep > 1 by a limit that nothing proves."""
    for variant in () if getattr(backend, "single_rank", False) else backend.variants:
        for limit in backend.limits(variant):
            if limit.on == "spread_experts" and limit.proof == "undefined" and not limit.allows(True):
                raise Unusable(
                    f"{target} excludes all of ep > 1 from {variant} by a limit that nothing proves; have the library "
                    "refuse it (proof='refused'), raise Unsupported, or say single_rank = True if nothing has ep > 1"
                )


def _require_device(device: str) -> None:
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise Unusable("--device cuda, but torch finds no GPU; take --device cpu, or a machine with one")


def _require_writable(folder: Path) -> None:
    """Create the folder if it does not exist, and check that it can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise Unusable(
            f"the report folder {folder} cannot be written ({error.strerror}); give another --report"
        ) from error

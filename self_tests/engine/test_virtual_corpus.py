"""The corpus of virtual ranks is what it claims, and judged on 512 ranks within its budget."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from moe_conformance.backends.native import Native
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine, Job
from moe_conformance.judging.observed.chunks import cut, solve_in_chunks
from moe_conformance.judging.verdict import Tally
from moe_conformance.plugin.options import Options, Unusable
from moe_conformance.plugin.run import prepare
from moe_conformance.reference.exchange import layer
from moe_conformance.reference.experts import swiglu_experts
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.spec.checks import by_requirement
from moe_conformance.workloads import virtual
from moe_conformance.workloads.plan import Plan
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.scripts import layout_names, workload_names
from moe_conformance.workloads.selection.profiles import full_layouts
from self_tests.checks import judge

EP64 = Layout(64, ep=64)
EP256 = Layout(256, ep=256)
EP512 = Layout(512, ep=512)


class Global(Native):
    """A backend whose library needs a process per rank."""

    process_per_rank = True


def named(name: str, layout: Layout) -> Workload:
    """The workload of that name."""
    return next(workload for workload in virtual.corpus("alltoall", layout) if workload.name == name)


def foldings(layouts: Sequence[Layout]) -> set[tuple[bool, ...]]:
    """Which of tp, ep and etp are greater than 1, for every layout."""
    return {(layout.tp > 1, layout.ep > 1, layout.etp > 1) for layout in layouts}


class TestCorpus:
    def test_layouts_are_valid_and_have_names_of_their_own(self) -> None:
        """Every layout can be built, none shares its name with another, and every world has some."""
        layouts = virtual.layouts()
        assert [None] * len(layouts) == [layout.problem for layout in layouts]
        assert len({layout.name for layout in layouts}) == len(layouts)
        assert len(set(layout_names())) == len(layout_names())
        assert set(virtual.WORLDS) == {layout.world for layout in layouts}

    @pytest.mark.parametrize("world", [64, 256])
    def test_every_folding_is_there(self, world: int) -> None:
        """What tp, ep and etp are beside 1 in the full profile, they are on many ranks."""
        many = [layout for layout in virtual.layouts() if layout.world == world]
        assert foldings(full_layouts()) == foldings(many)

    @pytest.mark.parametrize("layout", [layout for layout in virtual.layouts() if layout.world <= 64], ids=str)
    def test_workloads_are_extreme_where_they_say_so(self, layout: Layout) -> None:
        """Ranks without tokens, experts without rows, and two experts with far more than the others."""
        assert 0 in {len(batch.x_TD) for batch in named("many-ranks-some-without-tokens", layout).batches[0]}
        last = named("many-ranks-last-experts", layout)
        loads = Counter(e for batch in last.batches[0] for e in batch.ids_TK.reshape(-1).tolist())
        assert {last.config.experts - each for each in (1, 2, 3)} == set(loads)
        assert {workload.name for workload in virtual.corpus("alltoall", layout)} <= workload_names()

    def test_an_expert_of_512_ranks_gets_more_rows_than_a_byte_counts(self) -> None:
        """So that counts in a byte overflow."""
        workload = named("many-ranks-last-experts", EP512)
        loads = Counter(e for batch in workload.batches[0] for e in batch.ids_TK.reshape(-1).tolist())
        assert min(loads.values()) > 255

    def test_what_takes_the_square_of_ranks_in_memory_is_spared(self) -> None:
        """On the widest layouts the first variant runs alone, on those of 256 ranks the others get few tokens."""
        cells = Plan(Native(), "cpu", "virtual", 512).cells
        wide = [case for case in Plan(Native(), "cpu", "virtual", 256).cases if case.cell.layout == EP256]
        of: dict[str, set[str]] = {name: set() for name in Native.variants}
        for case in wide:
            if case.cell.variant in of:
                of[case.cell.variant].add(case.workload.name)
        few = {recipe.name for some in virtual.sparse_recipes(EP256) for recipe in some}
        assert [few] * (len(of) - 1) == [names for variant, names in of.items() if variant != "alltoall"]
        assert few < of["alltoall"] == virtual.names()
        assert {"alltoall"} == {cell.variant for cell in cells if cell.layout == EP512}
        assert set(Native.variants) == {cell.variant for cell in cells if cell.layout == EP64}
        assert {8, 64} == {cell.layout.world for cell in Plan(Native(), "cpu", "virtual", 255).cells}


class TestChunks:
    def test_the_oracle_says_the_same_in_pieces(self) -> None:
        """Outputs and gradients of 40 batches, some of them cut, are those of one batch of all their tokens."""
        config = replace(named("own-many-ranks-uneven", EP64).config, experts=8)
        generator = draw.generator("chunks")
        parameters = draw.expert_parameters(config, generator)
        batches = []
        for _ in range(40):
            drawn = draw.real_batch(draw.choose(3, config, generator), config, generator)
            batches.append(layer.Batch(drawn.x_TD, drawn.ids_TK, drawn.weights_TK, drawn.upstream))

        def solve(some: Sequence[layer.Batch]) -> layer.Gradients:
            return layer.gradients(*layer.global_batch(some), swiglu_experts, parameters)

        many = 1 << 16  # so that the oracle is asked for few tokens at a time
        parts = cut(batches, many)
        assert len(batches) < len(parts)
        whole, pieces = solve(batches), solve_in_chunks(parts, many, solve)
        close = partial(torch.allclose, rtol=1e-12, atol=1e-12)  # a product of one row may be summed in another order
        assert close(whole.y_TD, pieces.y_TD)
        assert close(whole.dx_TD, pieces.dx_TD)
        assert close(whole.dweights_TK, pieces.dweights_TK)
        assert all(close(whole.parameters[key], pieces.parameters[key]) for key in parameters)


class TestLargestWorld:
    def test_a_step_of_512_ranks_is_judged_within_a_gibibyte(self) -> None:
        """Dispatch, combine and backward on 512 ranks pass the exact checks; their process stays below 1 GiB."""
        workload = named("many-ranks-uneven", EP512)
        preload = ("moe_conformance.scenarios.moe_step", "self_tests.engine.virtual_jobs")
        with Engine(virtual=True, preload=preload) as engine:
            outcome = moe_step(engine, "native", workload)
            peak = engine.run(Job("self_tests.engine.virtual_jobs:peak_mib", None, 512, {})).ranks[0].value
        for requirement in ("EXCH-01", "EXCH-02", "EXCH-05", "EXCH-12", "GRAD-01", "GRAD-02", "GRAD-03"):
            for check in by_requirement()[requirement]:
                if check.reads(workload):
                    verdict = judge(check, outcome=outcome)
                    assert isinstance(verdict, Tally), verdict
                    assert not verdict.vacuous
        assert 100 < peak < 1024


class TestCommandLine:
    def test_a_bug_of_many_ranks_fails_the_run(self) -> None:
        """`--profile virtual --plant NAME` judges virtual ranks, says what is wrong and exits with 1."""
        plant = ("--plant", "destinations-in-a-word", "--only", "EXCH-01")
        done = run("--ranks", "64", *plant, "--", "-k", "alltoall-ep64-many-ranks-uneven")
        assert "instead of expert 127 on rank 63" in done.stdout
        assert 1 == done.returncode

    def test_a_library_with_global_state_is_refused(self) -> None:
        """Its ranks would take each other's groups for their own."""
        options = Options(backend=f"{__name__}:Global", profile="virtual", ranks=8)
        with pytest.raises(Unusable, match="keeps per-rank state in module globals"):
            prepare(options)

    def test_too_few_ranks_are_refused(self) -> None:
        """The virtual profile has no layout for 4 ranks, which is the default."""
        done = run()
        assert "no layout fits 4 ranks; give --ranks 8 to 512" in done.stdout
        assert 2 == done.returncode


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the virtual profile."""
    return subprocess.run(
        [sys.executable, "-m", "moe_conformance.cli", "run", "--profile", "virtual", *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )

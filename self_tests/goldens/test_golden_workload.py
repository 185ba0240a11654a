"""A workload of every layout is judged by stored values, and by nothing that an oracle of today says."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_conformance.contract.topology import Layout
from moe_conformance.goldens import regenerate, stored_values
from moe_conformance.judging.shared.experts.expected import ExpertsExpected
from moe_conformance.plugin.options import Options, Unusable
from moe_conformance.plugin.run import prepare
from moe_conformance.workloads import recipes
from moe_conformance.workloads.golden import CHAPTER, NAME, golden_workload
from moe_conformance.workloads.selection import profiles


def stored(place: str, name: str) -> torch.Tensor:
    """What the golden holds for a place of the weights."""
    return stored_values.read(stored_values.folder(), CHAPTER)[f"{place}/out/{name}"]


@pytest.fixture
def spoilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Goldens of which the output's first element is another, in order otherwise."""
    shutil.copytree(stored_values.folder(), tmp_path / "goldens")
    folder = tmp_path / "goldens"
    path = folder / f"{CHAPTER}.safetensors"
    tensors = load_file(path)
    tensors["output/out/y_TD"][0, 0] += 1
    entries = stored_values.read_manifest(folder)
    entries[CHAPTER] = stored_values.write(folder, CHAPTER, tensors, entries[CHAPTER])
    stored_values.write_manifest(folder, entries)
    monkeypatch.setattr(stored_values, "folder", lambda: folder)
    return folder


class TestWorkload:
    @pytest.mark.parametrize("layout", profiles.quick_layouts(), ids=lambda layout: layout.name)
    def test_every_quick_layout_has_it(self, layout: Layout) -> None:
        """Its ranks together have the stored tokens, in order, and no two the same."""
        found = [each for each in recipes.corpus("alltoall", layout, "quick") if each.name == NAME]
        assert 1 == len(found)
        tokens = torch.cat([batch.x_TD for batch in found[0].batches[0]])
        golden = stored_values.read(stored_values.folder(), CHAPTER)["layer/in/x_TD"]
        assert torch.equal(golden, tokens.double())
        assert len(golden) == len(golden.unique(dim=0))

    @pytest.mark.parametrize(
        "layout", [Layout(5), Layout(3, ep=3), Layout(4, pp=2, ep=2)], ids=lambda layout: layout.name
    )
    def test_it_is_left_out_where_it_does_not_fit(self, layout: Layout) -> None:
        """Tokens or experts that do not divide, and pipeline stages, each of which would see some tokens alone."""
        assert golden_workload("alltoall", layout) is None


class TestJudge:
    @pytest.mark.parametrize("place", ["output", "input"])
    def test_it_expects_the_stored_values(self, place: str) -> None:
        """Output, gradients of tokens, weights and parameters: bit for bit, whatever the oracle computes."""
        expected = ExpertsExpected.of_session(golden_workload("alltoall", Layout(2, ep=2)), place, "sum")
        ranks = [(0, rank) for rank in range(2)]
        for name, target in (("y_TD", expected.y), ("dx_TD", expected.dx), ("dweights_TK", expected.dweights)):
            assert torch.equal(stored(place, name), torch.cat([target(at).expected for at in ranks]))
        for name in ("gate", "up", "down"):
            own = [expected.parameter(0, (name, expert)).expected for expert in range(8)]
            assert torch.equal(stored(place, f"d{name}"), torch.stack(own))

    def test_it_follows_the_store_and_not_the_oracle(self, spoilt: Path) -> None:
        """A golden that says otherwise than the oracle is what a backend is held against."""
        workload = golden_workload("alltoall", Layout(1))
        told = ExpertsExpected.of_session(workload, "output", "sum").y((0, 0)).expected
        oracle = ExpertsExpected.of_session(replace(workload, golden=""), "output", "sum").y((0, 0)).expected
        assert [[0, 0]] == ((told - oracle).abs() > 1e-9).nonzero().tolist()
        assert 1.0 == pytest.approx(float((told - oracle)[0, 0]))

    def test_the_check_of_the_goldens_sees_that(self, spoilt: Path) -> None:
        """What was written in order is still not what the oracle gives."""
        (told,) = regenerate.check(spoilt, {CHAPTER: regenerate.chapters()[CHAPTER]}, list(regenerate.chapters()))  # type: ignore[attr-defined]
        assert told.startswith("experts: output/out/y_TD[0, 0] is ")


class TestRun:
    def test_goldens_that_cannot_be_read_are_told_before_ranks_start(self, spoilt: Path) -> None:
        """In a sentence, as wrong usage is."""
        (spoilt / f"{CHAPTER}.safetensors").unlink()
        with pytest.raises(Unusable, match=r"the goldens cannot be used: experts: experts\.safetensors is not there"):
            prepare(Options())

"""The stored trajectory of training: every layout that native offers keeps to it, and to what is stored alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_conformance.chapters.training.judge.expected import PARAMETERS, Expected
from moe_conformance.chapters.training.judge.reported import judge_loss, judge_norm
from moe_conformance.chapters.training.judge.state import judge_steps
from moe_conformance.chapters.training.workloads import golden_script
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.goldens import regenerate, stored_values
from moe_conformance.judging.verdict import Mismatch, Tally, WrongLoss, WrongParameter
from moe_conformance.reference.training.model import layers_of, outputs
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.chapter import EP2, EP2_EDP2, EP2_ETP2, SINGLE, TP2_EP2
from self_tests.goldens import native_hashes

LAYOUTS = (SINGLE, Layout(2), EP2, Layout(4, ep=4), EP2_EDP2, TP2_EP2, Layout(4, cp=2, ep=2), EP2_ETP2)
STEPS = 20


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute bounds as a run does: the tensors are tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks for all layouts."""
    with Engine(preload=("moe_conformance.scenarios.moe_step",)) as started:
        yield started


@pytest.fixture(scope="module")
def outcome(engine: Engine) -> Outcome:
    """Native's steps on one rank."""
    return run(engine, SINGLE)


def run(engine: Engine, layout: Layout) -> Outcome:
    """Train native on the stored tokens."""
    workload = golden_script(layout)
    assert workload is not None
    return moe_step(engine, "native", workload.through("alltoall"))


def spoil(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, by: float) -> None:
    """Make the last element of a stored output another, in goldens that are in order otherwise."""
    shutil.copytree(stored_values.folder(), folder)
    tensors = load_file(folder / "training.safetensors")
    tensors[f"trajectory/out/{name}"].view(-1)[-1] *= 1 + by
    entries = stored_values.read_manifest(folder)
    entries["training"] = stored_values.write(folder, "training", tensors, entries["training"])
    stored_values.write_manifest(folder, entries)
    monkeypatch.setattr(stored_values, "folder", lambda: folder)


def fresh(outcome: Outcome) -> Outcome:
    """The same outcome, of which nothing was expected yet."""
    return Outcome(outcome.backend, outcome.workload, outcome.ranks, outcome.seconds, outcome.disagreements)


class TestEveryLayout:
    @pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
    def test_native_keeps_to_it(self, engine: Engine, layout: Layout) -> None:
        """Loss, norm, parameters and moments of twenty steps; after the last the bounds still tell of a step."""
        found, tally = run(engine, layout), Tally()
        for judge in (judge_loss, judge_norm, judge_steps):
            judge(found, tally)
        assert {"loss", "norm", "parameters after 20 steps", "moments after 20 steps"} <= tally.deviations.keys()
        assert all(deviation.ratio <= 1 for deviation in tally.deviations.values())

    def test_the_bounds_say_something(self) -> None:
        """Half of all elements change by ten times what is allowed in the last step, and the loss is held to 1e-4."""
        expected = Expected(golden_script(EP2_EDP2))
        last = STEPS - 1
        ratios = []
        for key, after in expected.steps[last].after.parameters.items():
            before = expected.state_before(last).parameters[key]
            ratios.append(((after - before).abs() / expected.after(last, PARAMETERS, key).allowed).flatten())
        assert float(torch.cat(ratios).median()) > 10
        assert float(expected.errors[last].loss / expected.steps[last].loss) < 1e-4

    def test_no_selection_is_nearly_a_tie(self) -> None:
        """No token of any step would go elsewhere by rounding."""
        expected = Expected(golden_script(SINGLE))
        for number in range(STEPS):
            parameters = expected.state_before(number).parameters
            h_TD = expected.tokens(number).x_TD.double()
            for layer in layers_of(parameters):
                if ("router", None) in layer:
                    best_T3 = (h_TD @ layer["router", None].T).topk(3).values
                    assert float((best_T3[:, 1] - best_T3[:, 2]).min()) > 1e-3
                h_TD = outputs(h_TD, {(f"layer0/{name}", e): value for (name, e), value in layer.items()}, 2)


class TestAWrongGolden:
    @pytest.mark.parametrize(
        ("name", "judge", "error"),
        [
            ("loss_S", judge_loss, WrongLoss),
            ("norm_S", judge_norm, Mismatch),
            ("layer1.down.2", judge_steps, WrongParameter),
            ("layer2.router.second", judge_steps, WrongParameter),
        ],
    )
    def test_it_fails_what_is_right(
        self, outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, judge: object, error: type
    ) -> None:
        """Of the last step, by a hundredth: what is stored decides, and not the oracle of today."""
        spoil(monkeypatch, tmp_path / "goldens", name, 0.01)
        with pytest.raises(error, match="step 19"):
            judge(fresh(outcome), Tally())  # type: ignore[operator]

    def test_the_check_of_the_goldens_sees_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The oracle does not give what is stored."""
        spoil(monkeypatch, tmp_path / "goldens", "loss_S", 1e-6)
        known = regenerate.chapters()  # type: ignore[attr-defined]
        (told,) = regenerate.check(tmp_path / "goldens", {"training": known["training"]}, list(known))
        assert told.startswith("training: trajectory/out/loss_S[19] is ")


class TestHashes:
    def test_bits_are_those_that_were_written(self, outcome: Outcome) -> None:
        """Of native's parameters after every step, on the layout, torch and processor that wrote them."""
        stored = json.loads(native_hashes.FILE.read_text("utf-8"))
        if stored["made_by"] != native_hashes.made_by():
            pytest.skip(f"written by {stored['made_by']}, and here is {native_hashes.made_by()}")
        assert stored["steps"] == native_hashes.of(outcome)

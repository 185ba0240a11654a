"""Goldens are what the oracles of reference/ give, and any change of a golden is reported."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from moe_conformance import spec
from moe_conformance.goldens import regenerate, stored_values
from moe_conformance.goldens.chapters import chapters, routing

FOLDER = regenerate.FOLDER
KNOWN = list(chapters())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the goldens that may be spoilt."""
    for path in (*FOLDER.glob(f"*{stored_values.SUFFIX}"), FOLDER / stored_values.MANIFEST):
        shutil.copy(path, tmp_path)
    return tmp_path


def problems(folder: Path, **changed: Any) -> list[str]:
    """What --check says of the routing chapter, some of whose parts are other ones."""
    return list(regenerate.check(folder, {"routing": replace(routing.CHAPTER, **changed)}, KNOWN))


def changing(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[..., dict[str, torch.Tensor]]:
    """A recipe of the routing chapter whose outputs are changed by a function."""

    def work_out(inputs: Mapping[str, torch.Tensor], oracle: Any) -> dict[str, torch.Tensor]:
        made = dict(routing.work_out(inputs, oracle))
        change(made)
        return made

    return work_out


def edit(path: Path, name: str, at: int | tuple[int, ...], value: Any) -> None:
    """Changes one element of a stored tensor and leaves the rest of the file as it is."""
    tensors = load_file(path)
    tensors[name][at] = value
    save_file(tensors, path)


class TestStored:
    def test_they_are_what_the_oracles_give(self) -> None:
        """All chapters, and no file or entry beside them."""
        assert [] == list(regenerate.check(FOLDER, chapters(), KNOWN))

    def test_they_bear_the_name_of_a_chapter_of_theirs(self) -> None:
        """Or begin with it: a chapter may have several goldens, and a golden values of other chapters too."""
        for name, chapter in chapters().items():
            decided = {spec.load()[each].chapter for each in chapter.requirements}
            assert any(name == each or name.startswith(f"{each}_") for each in decided), name

    @pytest.mark.parametrize("name", KNOWN)
    def test_inputs_are_those_of_the_seed(self, name: str) -> None:
        """With the numpy of today; a numpy that draws otherwise would not spoil the goldens."""
        stored = stored_values.read(FOLDER, name)
        drawn = chapters()[name].draw(np.random.default_rng(chapters()[name].seed))
        assert {key for key in stored if "/in/" in key} == set(drawn)
        assert all(torch.equal(stored[key], value) for key, value in drawn.items())

    def test_values_are_double_precision_or_whole(self) -> None:
        """An oracle computes in float64 and leaves integers integers."""
        forms = {
            form.dtype for entry in stored_values.read_manifest(FOLDER).values() for form in entry.tensors.values()
        }
        assert {"float64", "int64"} == forms

    def test_provenance_is_told(self) -> None:
        """The commit that wrote a golden is one of this history's ids."""
        for entry in stored_values.read_manifest(FOLDER).values():
            assert 40 == len(entry.commit)
            assert entry.torch
            assert entry.suite


class TestSpoilt:
    def test_one_number_in_a_golden(self, folder: Path) -> None:
        """The hash names the chapter, and the oracle the element."""
        edit(folder / "routing.safetensors", "sigmoid-biased/out/weights_TK", (3, 1), 7.5)
        told = problems(folder)
        assert 2 == len(told)
        assert "routing: routing.safetensors has sha256" in told[0]
        assert "routing: sigmoid-biased/out/weights_TK[3, 1] is 0." in told[1]
        assert "the golden 7.5; 1 of 21 elements differ" in told[1]

    def test_one_number_in_an_input(self, folder: Path) -> None:
        """What the oracle works out from it is no longer what is stored."""
        edit(folder / "routing.safetensors", "softmax/in/logits_TE", (6, 11), 9.0)
        told = problems(folder)
        assert "routing: softmax/out/dlogits_TE[6, 0] is" in told[1]

    @pytest.mark.parametrize(
        ("field", "value"), [("seed", 2102), ("bytes", 1), ("torch", "9.9.9"), ("requirements", ["ROUTE-01"])]
    )
    def test_one_field_of_the_manifest(self, folder: Path, field: str, value: Any) -> None:
        """Whichever it is: the entry's digest is of all of them."""
        path = folder / stored_values.MANIFEST
        manifest = json.loads(path.read_text())
        manifest["routing"][field] = value
        path.write_text(json.dumps(manifest))
        assert ["routing: its entry in manifest.json was changed by hand: the digest is of other fields"] == problems(
            folder
        )

    def test_one_number_in_an_oracle(self, folder: Path) -> None:
        """A change of one element by a part in 10^10 is seen and named."""
        work_out = changing(lambda made: made["softmax/out/weights_TK"][2, 0].mul_(1 + 1e-10))
        (told,) = problems(folder, work_out=work_out)
        assert told.startswith("routing: softmax/out/weights_TK[2, 0] is 0.")

    def test_another_choice_of_an_oracle(self, folder: Path) -> None:
        """Integers have no tolerance."""
        (told,) = problems(folder, work_out=changing(lambda made: made["softmax/out/ids_TK"][4, 2].add_(1)))
        assert told.startswith("routing: softmax/out/ids_TK[4, 2] is ")

    def test_one_number_beside_an_infinity(self) -> None:
        """An infinity is compared with itself, and makes nothing beside it free."""
        stored = torch.tensor([float("inf"), 2.0], dtype=torch.float64)
        assert 2e-12 == regenerate._allowed(stored)
        assert 0.0 == regenerate._allowed(stored[:1])

    def test_an_oracle_that_fails(self, folder: Path) -> None:
        """It is reported like any other difference."""

        def work_out(inputs: Mapping[str, torch.Tensor], oracle: Any) -> None:
            raise ValueError("there is no such score")

        assert ["routing: the oracles no longer work it out: ValueError: there is no such score"] == problems(
            folder, work_out=work_out
        )

    def test_what_an_oracle_no_longer_gives_or_gives_anew(self, folder: Path) -> None:
        """Both are reported."""
        work_out = changing(lambda made: made.update({"softmax/out/more": made.pop("softmax/out/ids_TK")}))
        assert [
            "routing: softmax/out/ids_TK is no longer worked out",
            "routing: softmax/out/more is not in the golden",
        ] == problems(folder, work_out=work_out)

    def test_seed_and_requirements_of_a_chapter(self, folder: Path) -> None:
        """They stand in the manifest as the chapter has them."""
        requirements, seed = problems(folder, seed=1, requirements=("ROUTE-02",))
        assert requirements.endswith("the chapter ('ROUTE-02',)")
        assert "routing: the manifest says seed 2101, the chapter 1" == seed


class TestErrors:
    """Each way to go wrong is an error of its own."""

    def test_a_missing_file(self, folder: Path) -> None:
        """It is named."""
        (folder / "routing.safetensors").unlink()
        with pytest.raises(stored_values.MissingError, match=r"routing: routing\.safetensors is not there"):
            stored_values.read(folder, "routing")

    def test_a_chapter_without_golden(self, folder: Path) -> None:
        """It is named, on reading and on checking."""
        with pytest.raises(stored_values.MissingError, match=r"weather: manifest\.json has no such chapter; .*routing"):
            stored_values.read(folder, "weather")
        (found,) = stored_values.check_folder(folder, [*KNOWN, "weather"])
        assert isinstance(found, stored_values.MissingError)

    def test_no_manifest(self, tmp_path: Path) -> None:
        """The command that writes one is named."""
        with pytest.raises(stored_values.MissingError, match=r"python -m moe_conformance\.goldens\.regenerate"):
            stored_values.read(tmp_path, "routing")

    @pytest.mark.parametrize("content", ["{", "[]", '{"routing": {"seed": 1}}'])
    def test_a_manifest_that_is_none(self, folder: Path, content: str) -> None:
        """It is an altered one."""
        (folder / stored_values.MANIFEST).write_text(content)
        with pytest.raises(stored_values.AlteredError, match="cannot be read"):
            stored_values.read(folder, "routing")

    def test_an_unused_golden(self, folder: Path) -> None:
        """An entry that no chapter has, and a file that no entry has."""
        shutil.copy(folder / "routing.safetensors", folder / "old.safetensors")
        found = stored_values.check_folder(folder, [name for name in KNOWN if name != "routing"])
        assert [stored_values.UnusedError] * 2 == [type(each) for each in found]
        assert ["routing: nothing uses", "old.safetensors: manifest.json does not know"] == [
            str(found[0])[: len("routing: nothing uses")],
            str(found[1])[: len("old.safetensors: manifest.json does not know")],
        ]

    def test_a_truncated_file(self, folder: Path) -> None:
        """It says how much is there."""
        path = folder / "routing.safetensors"
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(stored_values.TruncatedError, match=r"routing\.safetensors ends after 100 of \d+ bytes"):
            stored_values.read(folder, "routing")

    def test_a_wrong_hash(self, folder: Path) -> None:
        """A file of the same length is not enough."""
        path = folder / "routing.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(stored_values.AlteredError, match="has sha256"):
            stored_values.read(folder, "routing")

    def test_less_precision(self, folder: Path) -> None:
        """A float32 value does not pass a float64 golden, however close."""
        stored = stored_values.read(folder, "routing")["softmax/out/weights_TK"]
        with pytest.raises(stored_values.DifferentError, match=r"is float32 \[7, 3\], the golden float64 \[7, 3\]"):
            stored_values.compare("routing", "weights_TK", stored, stored.float(), 1.0)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_what_is_not_finite(self, value: Any) -> None:
        """NaN is never the stored value; an infinity is when it is stored."""
        stored = torch.zeros(2, dtype=torch.float64)
        with pytest.raises(
            stored_values.DifferentError, match=r"x\[1\] is (nan|inf), the golden 0\.0; 1 of 2 elements"
        ):
            stored_values.compare("c", "x", stored, torch.tensor([0.0, value], dtype=torch.float64), 1.0)
        infinite = torch.full((2,), float("inf"))
        stored_values.compare("c", "x", infinite, infinite, 0.0)


class TestRegenerate:
    def test_nothing_changes_where_nothing_did(self, folder: Path) -> None:
        """Files and manifest stay, byte for byte."""
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        lines = regenerate.regenerate(folder, chapters(), "0" * 40)
        assert all(" 0 of " in line for line in lines)
        assert before == {path.name: path.read_bytes() for path in folder.iterdir()}

    def test_it_shows_what_becomes_different(self, folder: Path) -> None:
        """Which tensor, which element, from what to what."""
        edit_value = stored_values.read(folder, "routing")["softmax/out/weights_TK"][0, 0].item()
        work_out = changing(lambda made: made["softmax/out/weights_TK"][0, 0].fill_(0.5))
        other = replace(routing.CHAPTER, work_out=work_out)
        lines = regenerate.regenerate(folder, {"routing": other}, "f" * 40)
        assert "  softmax/out/weights_TK[0, 0] is 0.5, the golden " + repr(edit_value) in lines[1]
        assert 0.5 == stored_values.read(folder, "routing")["softmax/out/weights_TK"][0, 0]
        assert "f" * 40 == stored_values.read_manifest(folder)["routing"].commit
        assert "f" * 40 != stored_values.read_manifest(folder)["experts"].commit

    def test_nothing_is_written_if_a_chapter_fails(self, folder: Path) -> None:
        """All chapters or none."""

        def work_out(inputs: Mapping[str, torch.Tensor], oracle: Any) -> None:
            raise RuntimeError("the oracle is broken")

        broken = replace(routing.CHAPTER, work_out=work_out)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(RuntimeError, match="the oracle is broken"):
            regenerate.regenerate(folder, {**chapters(), "routing": broken}, "f" * 40)
        assert before == {path.name: path.read_bytes() for path in folder.iterdir()}

    def test_what_is_left_alone_must_be_in_order(self, folder: Path) -> None:
        """A part is not written beside spoilt other parts."""
        edit(folder / "experts.safetensors", "output/out/y_TD", (0, 0), 1.0)
        with pytest.raises(stored_values.AlteredError, match="experts"):
            regenerate.regenerate(folder, {"routing": routing.CHAPTER}, "f" * 40)


class TestCommand:
    def test_check_says_that_all_is_well(self) -> None:
        """And ends with 0."""
        run = CliRunner().invoke(regenerate.main, ["--check", "--only", "routing"])
        assert (0, "routing: as they were written\n") == (run.exit_code, run.output)

    def test_an_unknown_chapter(self) -> None:
        """The known ones are named."""
        run = CliRunner().invoke(regenerate.main, ["--only", "routes"])
        assert 2 == run.exit_code
        assert f"no chapter routes; there are {', '.join(KNOWN)}" in run.output

    def test_a_changed_checkout_is_refused(self, tmp_path: Path) -> None:
        """Goldens come from a commit that can be looked at."""
        clone = tmp_path / "clone"
        subprocess.run(["git", "clone", "--quiet", str(FOLDER.parent), str(clone)], check=True)
        (clone / "reference" / "routing" / "routes.py").write_text("broken\n")
        assert "reference/routing/routes.py" in changes_of(clone)

    def test_changed_goldens_are_not_in_the_way(self, tmp_path: Path) -> None:
        """They are what is about to be written."""
        clone = tmp_path / "clone"
        subprocess.run(["git", "clone", "--quiet", str(FOLDER.parent), str(clone)], check=True)
        (clone / "goldens" / "routing.safetensors").write_bytes(b"")
        assert "" == changes_of(clone)


def changes_of(checkout: Path) -> str:
    """What makes a checkout dirty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regenerate, "FOLDER", checkout / "goldens")
        return regenerate._changes()

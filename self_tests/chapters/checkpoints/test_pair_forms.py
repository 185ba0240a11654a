"""Stored forms and names, worked out twice: the first moves tensors and sets, the longhand asks each element."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance.reference.checkpoints import forms as first
from moe_conformance.reference.checkpoints import rules
from self_tests.chapters.checkpoints.second import forms as second
from self_tests.chapters.checkpoints.second import rules as second_rules
from self_tests.oracles.agreement import check_refused, ints
from self_tests.oracles.bits import PATTERNS, Bits, numbers, patterns, spelled

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)

dtypes = st.sampled_from(list(PATTERNS))
forms = st.builds(second.Form, st.booleans(), st.sampled_from([None, "halves", "interleaved"]), st.booleans())


def experts_of(E: int, F: int, D: int, seed: int) -> dict[tuple[str, int], Bits]:
    """Gate, up and down of every expert, as patterns."""
    random = np.random.default_rng(seed)
    shapes = {"gate": (F, D), "up": (F, D), "down": (D, F)}
    return {(name, e): patterns(random, shape) for e in range(E) for name, shape in shapes.items()}


class TestFormPair:
    @pairs_agree
    @given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), forms, dtypes, st.integers(0, 99))
    def test_files_agree(self, E: int, F: int, D: int, form: second.Form, dtype: torch.dtype, seed: int) -> None:
        """Both write the same names, shapes and bits, and read back what was written, each the other's file too."""
        held = experts_of(E, F, D, seed)
        stored = first.to_form({key: numbers(bits, dtype) for key, bits in held.items()}, first.Form(*form))  # type: ignore[arg-type]
        by_hand = second.stored(held, form)
        assert {name: bits.tolist() for name, bits in by_hand.items()} == {
            name: spelled(tensor).tolist() for name, tensor in stored.items()
        }
        assert {dtype} == {tensor.dtype for tensor in stored.values()}
        again = first.from_form({name: numbers(bits, dtype) for name, bits in by_hand.items()}, first.Form(*form))  # type: ignore[arg-type]
        for found in ({key: spelled(tensor) for key, tensor in again.items()}, second.read(by_hand, form, E, F, D)):
            assert {key: bits.tolist() for key, bits in held.items()} == {
                key: bits.tolist() for key, bits in found.items()
            }

    @pairs_agree
    @given(st.sampled_from(["halves", "interleaved"]), st.integers(1, 3), st.integers(1, 3), dtypes, st.integers(0, 99))
    def test_parts_of_a_fused_matrix_agree(
        self, how: first.Fused, parts: int, size: int, dtype: torch.dtype, seed: int
    ) -> None:
        """Gate and up are cut each; the part is fused as the whole was."""
        held = experts_of(1, parts * size, 2, seed)
        gate_FD, up_FD = held["gate", 0], held["up", 0]
        fused = first.fuse_gate_up(numbers(gate_FD, dtype), numbers(up_FD, dtype), how)
        assert second.fused_part(gate_FD, up_FD, how, 0, 1).tolist() == spelled(fused).tolist()
        for part in range(parts):
            expected = second.fused_part(gate_FD, up_FD, how, part, parts)
            assert expected.tolist() == spelled(first.shard_gate_up(fused, how, part, parts)).tolist()
        gate, up = first.split_gate_up(fused, how)
        assert [gate_FD.tolist(), up_FD.tolist()] == [spelled(gate).tolist(), spelled(up).tolist()]

    def test_bad_parts_are_refused(self) -> None:
        """Hidden units that do not divide, parts that do not exist, odd rows, other shapes, an unknown order."""
        gate = np.zeros((3, 2), dtype=np.int64)
        fused = torch.zeros(6, 2)
        for part, parts in [(0, 2), (3, 3), (-1, 3)]:
            check_refused(
                lambda part=part, parts=parts: first.shard_gate_up(fused, "halves", part, parts),  # type: ignore[misc]
                lambda part=part, parts=parts: second.fused_part(gate, gate, "halves", part, parts),  # type: ignore[misc]
            )
        for question in (
            lambda: first.split_gate_up(torch.zeros(5, 2), "halves"),
            lambda: first.split_gate_up(fused, "thirds"),  # type: ignore[arg-type]
            lambda: first.fuse_gate_up(fused, fused, "thirds"),  # type: ignore[arg-type]
            lambda: first.fuse_gate_up(fused, torch.zeros(6, 3), "interleaved"),
        ):
            with pytest.raises(ValueError, match=r"."):
                question()

    def test_files_with_other_names_are_refused(self) -> None:
        """A tensor missing, left over, of another form; stacks of different lengths; experts other than 0 .. E - 1."""
        held = {key: numbers(bits, torch.float32) for key, bits in experts_of(2, 3, 4, 0).items()}
        for form in (first.Form(), first.Form(stacked=True), first.Form(fused="halves"), first.Form(True, "halves")):
            file = first.to_form(held, form)
            for name in file:
                for wrong in ({n: t for n, t in file.items() if n != name}, {**file, f"{name}.scale": file[name]}, {}):
                    with pytest.raises(ValueError, match=r"."):
                        first.from_form(wrong, form)
        file = first.to_form(held, first.Form(stacked=True))
        with pytest.raises(ValueError, match="length"):
            first.from_form({**file, "up": file["up"][:1]}, first.Form(stacked=True))
        for wrong_experts in (
            {},
            {key: value for key, value in held.items() if key != ("up", 1)},
            {(name, e + 1): value for (name, e), value in held.items()},
            {**held, ("bias", 0): torch.zeros(4)},
        ):
            with pytest.raises(ValueError, match=r"."):
                first.to_form(wrong_experts, first.Form())

    def test_experts_of_different_shape_or_dtype_are_not_stacked(self) -> None:
        """Stacking would have to cast or to pad."""
        held = {key: numbers(bits, torch.float32) for key, bits in experts_of(2, 3, 4, 0).items()}
        for other in (held["down", 1].bfloat16(), held["down", 1][:, :2]):
            with pytest.raises(ValueError, match="down"):
                first.to_form({**held, ("down", 1): other}, first.Form(stacked=True))

    def test_gate_and_up_of_different_dtype_are_not_fused(self) -> None:
        """Joining them would widen one: no bits are changed by a form."""
        gate = torch.zeros(3, 2)
        for how in ("halves", "interleaved"):
            with pytest.raises(ValueError, match=r"."):
                first.fuse_gate_up(gate, gate.bfloat16(), how)


shapes = st.dictionaries(st.sampled_from("abcd"), st.sampled_from([(2,), (3,), (2, 3), ()]), max_size=4)
names = st.lists(st.sampled_from("abcd"), max_size=6)
places = st.tuples(st.sampled_from(["x", "y"]), st.sampled_from([None, 0, 1]))


@st.composite
def writings(draw: st.DrawFn) -> tuple[list[second_rules.Written], second_rules.Shapes]:
    """Boxes within their tensors, copied, changed, overlapping, empty or of a scalar."""
    whole = {"m": (3, 2), "v": (4,), "s": ()}
    parts = []
    for _ in range(draw(st.integers(0, 6))):
        name = draw(st.sampled_from(sorted(whole)))
        start = tuple(draw(st.integers(0, size)) for size in whole[name])
        shape = tuple(draw(st.integers(0, size - first)) for first, size in zip(start, whole[name], strict=True))
        values = np.full(shape, draw(st.sampled_from([0x0000, -0x8000, 0x7FC0])), dtype=np.int64)
        parts += [second_rules.Written(name, start, values)] * draw(st.integers(1, 2))
    return parts, whole


def part_of(part: second_rules.Written) -> rules.Part:
    """The same for the first oracle."""
    return rules.Part(part.name, part.start, numbers(part.values, torch.float32))


class TestRulePair:
    @pairs_agree
    @given(writings())
    def test_times_written_agree(self, case: tuple[list[second_rules.Written], second_rules.Shapes]) -> None:
        """Both count each element, copies of a box once, contradicting ones (0.0 and -0.0 are two) each."""
        parts, whole = case
        made = rules.times_written([part_of(part) for part in parts], whole)
        assert {name: times.tolist() for name, times in second_rules.times_written(parts, whole).items()} == {
            name: times.tolist() for name, times in made.items()
        }
        assert all(torch.int64 == times.dtype for times in made.values())

    def test_boxes_that_leave_their_tensor_are_refused(self) -> None:
        """Unknown names, other numbers of dimensions, before the start, beyond the end."""
        two = np.zeros(2, dtype=np.int64)
        for name, start, values in [
            ("w", (0,), two), ("v", (3,), two), ("v", (-1,), two), ("v", (0, 0), two), ("v", (0,), two.reshape(1, 2)),
            ("v", (5,), two[:0]),
        ]:  # fmt: skip
            part = second_rules.Written(name, start, values)
            check_refused(
                lambda part=part: rules.times_written([part_of(part)], {"v": (4,)}),  # type: ignore[misc]
                lambda part=part: second_rules.times_written([part], {"v": (4,)}),  # type: ignore[misc]
            )

    @pairs_agree
    @given(st.lists(shapes, min_size=1, max_size=3), st.booleans())
    def test_names_of_layouts_agree(self, layouts: list[dict[str, tuple[int, ...]]], alike: bool) -> None:
        """Both compare all names and all shapes."""
        if alike:
            layouts = [dict(reversed(layouts[0].items())) for _ in layouts]
        verdict = second_rules.all_alike(layouts)
        assert verdict == rules.same_names(layouts)
        assert verdict or not alike

    @pairs_agree
    @given(st.dictionaries(st.tuples(st.integers(0, 1), st.integers(0, 2), st.sampled_from(["up", "down"])), places))
    def test_collisions_agree(self, addresses: dict[tuple[int, int, str], tuple[str, int | None]]) -> None:
        """Both list who shares a place: one name, and one index or a whole tensor."""
        assert second_rules.shared_addresses(addresses) == list(rules.collisions(addresses))

    @pairs_agree
    @given(shapes, shapes, names)
    def test_misfits_agree(
        self, needed: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], optional: list[str]
    ) -> None:
        """Both name what is missing, left over and misshapen; optional names may be missing and nothing else."""
        made = rules.misfits(needed, found, optional=optional)
        assert second_rules.misfits(needed, found, optional) == tuple(list(part) for part in made)

    @pairs_agree
    @given(names, st.sets(st.sampled_from("abcd")), names, st.sets(st.sampled_from("abcd")), names)
    def test_conversion_faults_agree(
        self, used: list[str], present: set[str], filled: list[str], needed: set[str], unused: list[str]
    ) -> None:
        """Both name tensors not used, used twice or invented, and parameters not filled, filled twice or unknown."""
        made = rules.conversion_faults(used, present, filled, needed, unused=unused)
        by_hand = second_rules.conversion_faults(used, present, filled, needed, unused)
        assert by_hand == {kind: list(value) for kind, value in made._asdict().items()}


class TestByHand:
    def test_one_element_in_all_twelve_forms(self) -> None:
        """F = 2, D = 1: where the element up[1, 0] = 6 lies in each form."""
        held = {("gate", 0): ints([[1], [2]]), ("up", 0): ints([[5], [6]]), ("down", 0): ints([[8, 9]])}
        for stacked in (False, True):
            # Apart: up, row 1. Halves: row F + 1 = 3. Interleaved: row 2 * 1 + 1 = 3. Transposed: a column.
            for fused, name, row in ((None, "up", 1), ("halves", "gate_up", 3), ("interleaved", "gate_up", 3)):
                for transposed in (False, True):
                    file = first.to_form(held, first.Form(stacked, fused, transposed))  # type: ignore[arg-type]
                    tensor = file[name][0] if stacked else file[f"0.{name}"]
                    assert 6 == tensor[(0, row) if transposed else (row, 0)].item()

    def test_an_optional_name_that_is_there(self) -> None:
        """It is not left over; if the model needs it, its shape counts; if it is absent, it is not missing."""
        assert ((), (), ()) == rules.misfits({"a": (2,)}, {"a": (2,), "extra": (9,)}, optional=["extra"])
        assert ((), (), ("extra",)) == rules.misfits({"extra": (1,)}, {"extra": (9,)}, optional=["extra"])
        assert ((), (), ()) == rules.misfits({"extra": (1,)}, {}, optional=["extra"])

"""Drawn workloads as files: the way back gives the same bits, and nothing that is no workload gets through."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.drawn.example import ASKED, describe, to_json
from moe_conformance.workloads.drawn.reading_example import BadExample, from_json, load
from moe_conformance.workloads.drawn.router_strategies import route_workloads
from moe_conformance.workloads.drawn.strategies import probe_workloads
from moe_conformance.workloads.recipes import corpus
from moe_conformance.workloads.records.runs import ExpertsStep
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.routers import routing_corpus

EP2 = Layout(2, ep=2)
WORKLOADS = st.sampled_from([EP2, Layout(4, ep=2, etp=2)]).flatmap(
    lambda layout: probe_workloads("alltoall", layout, (), "cpu") | route_workloads("alltoall", layout, (), "cpu")
)


def same(one: Tensor, other: Tensor) -> bool:
    """Compare bytes and form: -0 is not 0 here."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def read_back(workload: Workload) -> Workload:
    """Write a workload down as a file has it, and read it."""
    return from_json(json.loads(json.dumps(to_json(workload), allow_nan=False)))


def example(kind: str) -> dict[str, Any]:
    """Return one workload as JSON, to be spoiled."""
    pinned = corpus("alltoall", EP2, "quick") if kind == "probe" else routing_corpus("alltoall", EP2)
    data: dict[str, Any] = json.loads(json.dumps(to_json(next(iter(pinned)))))
    return data


def plain(workload: Workload) -> bool:
    """Whether a pinned workload asks for no more than one that is drawn."""
    options = workload.config.options()
    few = all(T <= 1024 for tokens in workload.tokens for T in tokens) and not workload.twist.beside
    asked = Config().changed({name: options[name] for name in ASKED})
    few = few and "R" not in workload.schedule
    return few and workload.run != ExpertsStep() and workload.config == asked


class TestWayBack:
    @settings(max_examples=60)
    @given(workload=WORKLOADS)
    def test_every_bit_is_kept(self, workload: Workload) -> None:
        """Of tokens, ids, weights, upstream gradients and parameters; and what is asked for is equal."""
        again = read_back(workload)
        assert replace(workload, name="", batches=(), parameters={}) == replace(
            again, name="", batches=(), parameters={}
        )
        for old, new in zip(workload.batches, again.batches, strict=True):
            for one, other in zip(old, new, strict=True):
                assert all(same(getattr(one, each.name), getattr(other, each.name)) for each in fields(one))
        assert workload.parameters.keys() == again.parameters.keys()
        assert all(same(value, again.parameters[key]) for key, value in workload.parameters.items())

    def test_of_pinned_workloads_too(self) -> None:
        """Of any schedule, lead and asynchrony; not those that ask for more than is drawn."""
        pinned = [work for work in (*corpus("alltoall", EP2, "quick"), *routing_corpus("alltoall", EP2)) if plain(work)]
        assert {"flat", "two_dims"} <= {workload.lead for workload in pinned}
        for workload in pinned:
            assert to_json(workload) == to_json(read_back(workload))

    def test_signed_zeros_and_subnormals(self) -> None:
        """The shortest decimal reads back to the same number, the smallest there are included."""
        workload = next(iter(corpus("alltoall", EP2, "quick")))
        batch = workload.batches[0][0]
        weights_TK = batch.weights_TK.clone()
        weights_TK[0], weights_TK[1] = -0.0, 2.0**-149
        changed = replace(workload, batches=((replace(batch, weights_TK=weights_TK), workload.batches[0][1]),))
        assert same(weights_TK, read_back(changed).batches[0][0].weights_TK)

    @pytest.mark.parametrize(
        "asked", [{"extra": (("knob", object()),)}, {"padding.tokens": "group_max"}], ids=["extra", "padding"]
    )
    def test_what_is_never_drawn_is_not_written_down(self, asked: Any) -> None:
        """Knobs of one backend may be anything, and other fields have no way back."""
        workload = next(iter(corpus("alltoall", EP2, "quick")))
        with pytest.raises(ValueError, match="only what is drawn can be written down"):
            to_json(replace(workload, config=workload.config.changed(asked)))

    def test_it_is_told_in_words(self) -> None:
        """A person reads what is asked for, and what goes where."""
        lines = describe(next(iter(routing_corpus("alltoall", EP2))))
        assert "drawn: E = 8, K = 2, D = 32, float32, softmax, schedule F0 B0" == lines[0]
        assert "  microbatch 0, rank 1: 8 tokens" == lines[2]


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Return what replaces the value at a path by the last of the arguments."""
    *where, last, value = path

    def spoil(data: dict[str, Any]) -> None:
        inner: Any = data
        for step in where:
            inner = inner[step]
        inner[last] = value

    return spoil


BATCH = ("batches", 0, 0)
SPOILED = {
    "an unknown field": (put("more", 1), "'more'"),
    "a missing field": (lambda data: data.pop("schedule"), "'schedule'"),
    "another format": (put("format", 1), "format is 1"),
    "another kind": (put("kind", "experts"), "kind: 'experts'"),
    "a layout without ranks": (put("layout", "world", 0), "layout.world: 0"),
    "a layout that does not divide": (put("layout", "ep", 3), "does not divide"),
    "too many ranks": (put("layout", "world", 1 << 40), "is not a whole number from 1 to 512"),
    "true for a number": (put("config", "experts", True), "config.experts: True"),
    "text for a number": (put("config", "routing.scale", "1"), "config.routing.scale: '1'"),
    "a number beyond all": (put("config", "routing.scale", 10**400), "is not a finite number"),
    "1 for true": (put("config", "routing.normalise", 1), "config.routing.normalise: 1"),
    "too many experts": (put("config", "experts", 10**9), "config.experts"),
    "experts that ep does not divide": (put("config", "experts", 7), "cannot be divided among ep = 2"),
    "more slots than experts": (put("config", "top_k", 9), "config: top_k = 9"),
    "an unknown score": (put("config", "routing.score", "rank"), "config.routing.score: 'rank'"),
    "a dtype that torch has and we have not": (put("config", "dtype", "complex64"), "config.dtype: 'complex64'"),
    "a list for a dtype": (put("config", "dtype", ["float32"]), "config.dtype"),
    "one group": (put("config", "routing.groups", [4]), "config.routing.groups has 1 entries"),
    "groups that do not divide": (put("config", "routing.groups", [3, 1]), "G must divide E"),
    "a backward before its forward": (put("schedule", "B0 F0"), "schedule: 'B0'"),
    "a microbatch that is not there": (put("schedule", "F0 B0 F1 B1"), "schedule: 'F1'"),
    "no forward": (put("schedule", ""), "schedule: ''"),
    "half a forward": (put("schedule", "D0"), "does not go forward"),
    "an endless schedule": (put("schedule", "F0 " * 99), "schedule"),
    "an unknown lead": (put("lead", "three_dims"), "lead"),
    "an unknown asynchrony": (put("asynchrony", "late"), "asynchrony"),
    "parameters for a probe": (put("parameters", "router", 1), "'router'"),
    "no microbatch": (put("batches", []), "holds 0 microbatches"),
    "a rank too few": (lambda data: data["batches"][0].pop(), "batches[0] has 1 entries; 2 fit"),
    "a shape with another size": (put(*BATCH, "ids", "shape", [16, 1]), "ids has the shape"),
    "a shape that overflows": (put(*BATCH, "x", "shape", [1 << 62, 32]), "x.shape"),
    "a tensor of another dtype": (put(*BATCH, "ids", "dtype", "float32"), "ids has the dtype float32; int64 fits"),
    "a value too few": (lambda data: data["batches"][0][0]["weights"]["values"].pop(), "weights.values has"),
    "an expert that is not there": (put(*BATCH, "ids", "values", 0, 8), "an id is neither -1 nor one of 8"),
    "half an expert": (put(*BATCH, "ids", "values", 0, 0.5), "0.5 is not a whole number"),
    "a number that float32 has not": (put(*BATCH, "weights", "values", 0, 0.1), "that float32 does not have"),
    "infinity": (put(*BATCH, "weights", "values", 0, float("inf")), "inf is not a finite number"),
    "a token with another tag": (put(*BATCH, "x", "values", 0, 3.0), "not the tags of its tokens"),
}  # fmt: skip


ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(["", "float16", "probe", "F0"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


class TestSafety:
    @pytest.mark.parametrize("spoiled", SPOILED)
    def test_what_is_wrong_is_said(self, spoiled: str) -> None:
        """In a sentence that names the place; no other exception."""
        spoil, words = SPOILED[spoiled]
        data = example("probe")
        spoil(data)
        with pytest.raises(BadExample) as raised:
            from_json(data)
        assert words in str(raised.value)

    def test_of_a_router(self) -> None:
        """Its router has one form, and a bias is there where one is asked for."""
        data = example("route")
        data["config"]["routing.balance_bias"] = True
        with pytest.raises(BadExample, match="'balance_bias'"):
            from_json(data)
        data = example("route")
        data["parameters"]["router"]["shape"] = [32, 8]
        with pytest.raises(BadExample, match=r"\[8, 32\] fits"):
            from_json(data)

    @settings(max_examples=300)
    @given(data=st.data())
    def test_whatever_is_changed_nothing_else_happens(self, data: st.DataObject) -> None:
        """Any value anywhere: it still is a workload, or it is refused in a sentence."""
        spoiled = example(data.draw(st.sampled_from(["probe", "route"])))
        inner: Any = spoiled
        while True:
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            key = data.draw(st.sampled_from(keys))
            if not isinstance(inner[key], dict | list) or not inner[key] or data.draw(st.booleans()):
                break
            inner = inner[key]
        inner[key] = data.draw(ANYTHING)
        with suppress(BadExample):
            assert isinstance(from_json(spoiled), Workload)

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "it is not JSON"),
            (b"\xff\xfe", "it is no text in UTF-8"),
            (b"[" * 100_000, "it is nested more than 64 deep"),
            (b'{"said": {}, "workload": NaN}', "NaN is no number"),
            (b'{"said": {}, "workload": ' + b"9" * 5000 + b"}", "it is not JSON"),
            (b'{"workload": {}}', "'said'"),
            (b"[]", "the file is not an object"),
            (b" " * ((1 << 24) + 1), "it is larger than 16777216 bytes"),
        ],
        ids=["empty", "binary", "deep", "NaN", "long number", "no said", "list", "large"],
    )
    def test_files(self, tmp_path: Path, content: bytes, words: str) -> None:
        """What is no example is refused before anything is made of it."""
        path = tmp_path / "example.json"
        path.write_bytes(content)
        with pytest.raises(BadExample) as raised:
            load(path)
        assert words in str(raised.value)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        """Or is a folder."""
        for path in (tmp_path / "none.json", tmp_path):
            with pytest.raises(BadExample, match="it cannot be read"):
                load(path)

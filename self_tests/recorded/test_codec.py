"""What ranks observed is read from a file with every bit, and nothing else can be made of one."""

from __future__ import annotations

import json
import math
import struct
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from moe_conformance.contract import Claims
from moe_conformance.recorded.codec import Encoder, decode, known_records
from moe_conformance.recorded.pools import BadRecording
from moe_conformance.scenarios.outcome import Answer, Grad, RankOutcome
from moe_conformance.workloads.records.workload import Workload

OUTCOME = "moe_conformance.scenarios.outcome"
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
LAYOUTS = ("contiguous", "transposed", "expanded", "with gaps")


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Draw a tensor of any bits, without elements and without dims too, as it may lie in memory."""
    dtype, layout = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(LAYOUTS))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=size, max_size=size))
    bits = torch.tensor(list(content), dtype=torch.uint8)
    tensor = (bits % 2 if dtype == torch.bool else bits).view(dtype).reshape(shape)
    if layout == "transposed" and shape:
        return tensor.transpose(0, -1)
    if layout == "expanded":
        return tensor.unsqueeze(0).expand(3, *shape)
    if layout == "with gaps" and shape:
        return torch.cat([tensor, tensor])[::2]
    return tensor


# A NaN of Python has bits of its own too.
floats = st.binary(min_size=8, max_size=8).map(lambda content: struct.unpack(">d", content)[0])
plain = st.none() | st.booleans() | st.integers() | floats | st.text() | st.sampled_from(DTYPES)
keys = st.integers() | st.text() | st.tuples(st.text(), st.none() | st.integers())
claims = st.builds(Claims, dtype=st.none() | st.sampled_from(DTYPES), multiple=st.integers(1, 9))
grads = st.builds(Grad, st.none() | tensors(), st.none() | st.tuples(*[st.integers()] * 3))
values = st.recursive(
    plain | tensors() | grads | claims,
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(keys, parts, max_size=3)
        | st.frozensets(keys, max_size=3)
        | st.builds(Answer, values=st.dictionaries(st.text(), parts, max_size=2), claims=claims)
    ),
    max_leaves=8,
)


def through_a_file(value: Any) -> Any:
    """Return a value as it is read from text and from bytes."""
    encoder = Encoder()
    text = json.dumps(encoder.encode(value), allow_nan=False)
    return decode(json.loads(text), load(save(encoder.pools.flat())))


def form(value: Any) -> Any:
    """Return a value in a form in which every bit counts: types, signs, tensors as bytes."""
    if isinstance(value, Tensor):
        content = value.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).tolist()
        return Tensor, value.dtype, tuple(value.shape), content
    if isinstance(value, float):
        return float, struct.pack(">d", value)
    if isinstance(value, list | tuple):
        return type(value), [form(part) for part in value]
    if isinstance(value, dict):
        return dict, [(form(key), form(part)) for key, part in value.items()]
    if isinstance(value, frozenset):
        return frozenset, sorted((form(part) for part in value), key=repr)
    if hasattr(value, "__dataclass_fields__"):
        return type(value), [form(getattr(value, name)) for name in value.__dataclass_fields__]
    return type(value), value


class TestValues:
    @given(values)
    def test_every_bit_returns(self, value: Any) -> None:
        """Of tensors, numbers, records and what holds them; NaN has its payload, zero its sign."""
        assert form(value) == form(through_a_file(value))

    @given(tensors())
    def test_the_order_in_memory_returns(self, tensor: Tensor) -> None:
        """Transposed and expanded tensors lie as they did; between the elements of others there are no gaps."""
        found = through_a_file(tensor)
        dims = [dim for dim, size in enumerate(tensor.shape) if size > 1] if tensor.numel() else []
        was, now = ([each.stride(dim) for dim in dims] for each in (tensor, found))
        assert [stride == 0 for stride in was] == [stride == 0 for stride in now]
        assert sorted(dims, key=lambda dim: was[dims.index(dim)]) == sorted(dims, key=lambda dim: now[dims.index(dim)])

    def test_equal_tensors_are_stored_once(self) -> None:
        """And are two when they are read."""
        one, other = through_a_file((torch.ones(100), torch.ones(100)))
        encoder = Encoder()
        encoder.encode((one, other))
        assert 100 == encoder.pools.flat()["float32"].numel()
        assert one.data_ptr() != other.data_ptr()

    def test_defaults_are_left_out(self) -> None:
        """So that a field which is added later changes no file."""
        assert {f"{OUTCOME}:RankOutcome": {"rank": 1, "status": "ok"}} == Encoder().encode(RankOutcome(1, "ok"))
        assert RankOutcome(1, "ok") == through_a_file(RankOutcome(1, "ok"))

    @pytest.mark.parametrize("value", [object(), print, b"bytes", Encoder, 1j, Workload], ids=lambda it: str(type(it)))
    def test_what_is_no_data_is_not_stored(self, value: object) -> None:
        """It is named in a sentence."""
        with pytest.raises(BadRecording, match="no data that can be stored"):
            Encoder().encode(value)


class TestForeignFiles:
    @pytest.mark.parametrize(
        "name",
        [
            "antigravity:geohash", "os:system", "builtins:eval", "subprocess:Popen", "collections:OrderedDict",
            "moe_conformance.cli.base:CannotRun", "moe_conformance.plugin.options:Options", f"{OUTCOME}:Tensor",
            f"{OUTCOME}:RankOutcome.__init__", "moe_conformance.workloads.records.workload:Workload", "Grad:", ":",
        ],
    )  # fmt: skip
    def test_only_records_of_outcomes_are_made(self, name: str) -> None:
        """No other class, of this package or of another, and no module is imported for it."""
        with pytest.raises(BadRecording, match="no record of outcomes"):
            decode({name: {}}, {})
        assert "antigravity" not in sys.modules

    def test_the_known_records_are_data(self) -> None:
        """Records of what ranks observe, all of this package."""
        assert {f"{OUTCOME}:RankOutcome", f"{OUTCOME}:Answer"} < known_records().keys()
        assert all(name.startswith("moe_conformance.") for name in known_records())

    @pytest.mark.parametrize(
        "document",
        [
            {"pickle": "gASVCg=="}, {"tensor": "x", "dtype": "float32"}, {}, {"dtype": "os"}, {"float": "zz"},
            {"map": [[1]]}, {"map": [[{"list": []}, 1]]}, {"list": 3}, {"size": ["a"]}, math.nan, {"float": "00"},
            {f"{OUTCOME}:Grad": {"value": None, "other": 1}}, {f"{OUTCOME}:Grad": {}}, {f"{OUTCOME}:Grad": []},
            {"moe_conformance.contract.claims:Claims": {"wire": "by post"}},
        ],
        ids=repr,
    )  # fmt: skip
    def test_what_is_no_value_is_refused(self, document: Any) -> None:
        """With a sentence, whatever is wrong."""
        with pytest.raises(BadRecording):
            decode(document, {})

    @pytest.mark.parametrize(
        "place",
        [
            None, ["float32", 0], ["float64", 0, [1]], [["float32"], 0, [1]], ["float32", -1, [1]],
            ["float32", 0, [9]], ["float32", 8, [1]], ["float32", 0, [1 << 80]], ["float32", 0, [0, 1 << 80]],
            ["float32", True, [1]], ["float32", 0, [2, 2], [1]], ["float32", 0, [2, 2], [1 << 40, 1]],
            ["float32", 0, [1 << 60], [0]], ["load", 0, [1]],
        ],
        ids=repr,
    )  # fmt: skip
    def test_a_tensor_lies_within_the_file(self, place: Any) -> None:
        """Whatever the document says of its place."""
        with pytest.raises(BadRecording):
            decode({"tensor": place}, {"float32": torch.zeros(8)})

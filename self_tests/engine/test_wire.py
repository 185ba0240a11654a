"""Values that are sent between driver and ranks arrive unchanged."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from moe_conformance.engine import wire

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def sample(dtype: torch.dtype) -> torch.Tensor:
    """Returns a (3, 5) tensor with distinct values, negative ones where the dtype has them."""
    values = torch.arange(15).reshape(3, 5) - (0 if dtype in (torch.bool, torch.uint8) else 7)
    return values.to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """Returns the tensor's memory, for comparisons that NaN and float8 cannot disturb."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def travel(value: object) -> Any:
    """Serialises a value and reads it back."""
    return wire.loads([bytearray(buffer) for buffer in wire.dumps(value)])


class TestTensors:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype_arrives_bit_for_bit(self, dtype: torch.dtype) -> None:
        """A tensor of any dtype keeps dtype, shape and bits."""
        sent = sample(dtype)
        got = travel(sent)
        assert (sent.dtype, sent.shape, bits(sent)) == (got.dtype, got.shape, bits(got))

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
    def test_degenerate_shapes_arrive(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Tensors without dimensions or elements keep their shape and dtype."""
        sent = torch.ones(shape).to(dtype)
        got = travel(sent)
        assert (sent.dtype, sent.shape, bits(sent)) == (got.dtype, got.shape, bits(got))

    @pytest.mark.parametrize(
        "view",
        [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1], lambda t: t.expand(2, 3, 5), lambda t: t.flip(0)],
        ids=["transposed", "strided", "row", "expanded", "flipped"],
    )
    def test_views_arrive_contiguous(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """A view arrives with the same elements, contiguous."""
        sent = view(torch.randn(3, 5))
        got = travel(sent)
        assert torch.equal(sent, got)
        assert got.is_contiguous()

    def test_conjugate_views_arrive_resolved(self) -> None:
        """The lazy conjugation of a complex tensor is applied."""
        sent = torch.randn(4, dtype=torch.complex64).conj()
        assert torch.equal(sent, travel(sent))

    def test_gradients_stay_behind(self) -> None:
        """A parameter arrives as a plain tensor that requires no gradient."""
        sent = torch.nn.Parameter(torch.randn(3))
        got = travel(sent)
        assert torch.equal(sent.detach(), got)
        assert (torch.Tensor, False) == (type(got), got.requires_grad)

    def test_arrived_tensors_are_writable(self) -> None:
        """Tensors that arrive are writable."""
        got = travel(torch.zeros(3))
        got += 1
        assert [1.0, 1.0, 1.0] == got.tolist()

    def test_one_tensor_named_twice_arrives_once(self) -> None:
        """A tensor that occurs twice in a value is one object after loading."""
        tensor = torch.randn(3)
        got = travel({"a": tensor, "b": [tensor]})
        assert got["a"] is got["b"][0]

    def test_memory_travels_out_of_band(self) -> None:
        """The tensor's memory is a buffer of its own; the pickle stays small."""
        tensor = torch.randn(1000)
        head, body = wire.dumps(tensor)
        assert tensor.data_ptr() == np.frombuffer(body, np.uint8).ctypes.data
        assert len(head) < 500

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.eye(3).to_sparse(),
            torch.empty(3, device="meta"),
            torch.nn.Buffer(torch.ones(2)).as_subclass(type("Odd", (torch.Tensor,), {})),
        ],
        ids=["sparse", "meta", "subclass"],
    )
    def test_tensors_without_plain_memory_are_refused(self, tensor: torch.Tensor) -> None:
        """A tensor that cannot be rebuilt from bytes, dtype and shape is refused with the reason."""
        with pytest.raises(TypeError, match="sent"):
            wire.dumps(tensor)


class TestOtherValues:
    def test_nested_values_arrive(self) -> None:
        """Containers, arrays and strings travel beside tensors."""
        array = np.arange(6.0).reshape(2, 3)
        got = travel({"rows": [1, (2.5, None)], "array": array, "dtype": torch.bfloat16, "bytes": b"\0x"})
        assert (array == got.pop("array")).all()
        assert {"rows": [1, (2.5, None)], "dtype": torch.bfloat16, "bytes": b"\0x"} == got

    def test_what_cannot_be_pickled_raises(self) -> None:
        """A local function has no name to pickle."""
        with pytest.raises((pickle.PicklingError, AttributeError)):
            wire.dumps(lambda: 1)


class TestChannel:
    @pytest.fixture
    def ends(self) -> Iterator[tuple[wire.Channel, wire.Channel]]:
        """Two channels, joined."""
        left, right = map(wire.Channel, socket.socketpair())
        yield left, right
        left.close()
        right.close()

    @pytest.mark.parametrize("sizes", [(0,), (1, 0, 3), (70_000,), (5, 3_000_000, 0, 1)], ids=str)
    def test_messages_arrive_whole(self, ends: tuple[wire.Channel, wire.Channel], sizes: tuple[int, ...]) -> None:
        """A message keeps the number and the bytes of its buffers, empty or larger than the socket's buffer."""
        left, right = ends
        sent = [np.random.default_rng(size).bytes(size) for size in sizes]
        sender = threading.Thread(target=left.send, args=(sent,))
        sender.start()
        got = right.receive()
        sender.join(timeout=10)
        assert sent == [bytes(buffer) for buffer in got]

    def test_a_closed_end_is_an_end_of_file(self, ends: tuple[wire.Channel, wire.Channel]) -> None:
        """Receiving from a closed channel raises EOFError, after what was sent before."""
        left, right = ends
        left.send([b"last words"])
        left.close()
        assert [b"last words"] == right.receive()
        with pytest.raises(EOFError):
            right.receive()

    def test_what_is_no_message_is_told(self, ends: tuple[wire.Channel, wire.Channel]) -> None:
        """Other bytes are neither read as a length nor as an answer."""
        left, right = ends
        left.socket.sendall(b"some text\n")
        with pytest.raises(wire.GarbledError, match="b'some tex' is not the start of a message"):
            right.receive()

"""Serialises values and sends them between driver and ranks: pickle protocol 5, large buffers out of band.

Torch pickles tensors through shared memory or byte by byte; here a tensor is sent as its bytes, dtype and shape. It
arrives as a plain, contiguous, writable CPU tensor that shares memory with no other: strides, autograd history,
`requires_grad` and being a Parameter are lost.
"""

from __future__ import annotations

import io
import pickle
import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

Buffer: TypeAlias = bytes | bytearray | memoryview

_MARK = b"\xffmessage"  # no UTF-8 text begins with this
_GIB = 1 << 30
_SMALL = 1 << 16  # below this a message is joined and sent by one system call


class GarbledError(Exception):
    """The bytes that were received are not a message."""


class TooLargeError(ValueError):
    """A value has more bytes than may be sent."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"it takes {size / _GIB:.1f} GiB, and more than {limit / _GIB:.1f} GiB are not sent")


def dumps(value: object, limit: int | None = None) -> list[Buffer]:
    """Pickles a value into buffers: the pickle first, then the memory of tensors and arrays, uncopied.

    Raises:
        TooLargeError: the buffers have more than `limit` bytes. Raised before a tensor is copied that is not in plain
            CPU memory.
        Exception: whatever pickling raises; TypeError for a tensor that is not a plain dense one.
    """
    out_of_band: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, out_of_band.append, limit).dump(value)
    buffers: list[Buffer] = [stream.getvalue(), *(buffer.raw() for buffer in out_of_band)]
    _check_size(sum(memoryview(buffer).nbytes for buffer in buffers), limit)
    return buffers


def loads(buffers: Sequence[Buffer]) -> Any:
    """Unpickles what `dumps` returned; the tensors share memory with the buffers, which must be writable."""
    return pickle.loads(buffers[0], buffers=buffers[1:])


def _check_size(size: int, limit: int | None) -> None:
    if limit is not None and size > limit:
        raise TooLargeError(size, limit)


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, take: Callable[[pickle.PickleBuffer], object], limit: int | None) -> None:
        super().__init__(stream, protocol=5, buffer_callback=take)
        self._limit = limit
        self._size = 0  # of the tensors so far

    def reducer_override(self, obj: object) -> tuple[Callable[..., object], tuple[object, ...]]:
        if isinstance(obj, torch.Tensor):
            self._size += obj.numel() * obj.element_size()
            _check_size(self._size, self._limit)
            return _restore, _strip(obj)
        return NotImplemented  # type: ignore[no-any-return]


def _strip(tensor: torch.Tensor) -> tuple[pickle.PickleBuffer, torch.dtype, tuple[int, ...]]:
    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(f"a {kind.__module__}.{kind.__qualname__} cannot be sent; send the plain tensor in it")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError(f"only a dense tensor can be sent, not {tensor.layout}, {tensor.device}, {tensor.dtype}")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy().data
    return pickle.PickleBuffer(raw), plain.dtype, tuple(plain.shape)


def _restore(raw: Buffer, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if len(raw) == 0:  # frombuffer refuses an empty buffer
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(shape)


class Channel:
    """One end of a socket pair, over which messages are sent: lists of buffers.

    Every send and receive may raise TimeoutError if a `timeout` is set, BrokenPipeError or
    ConnectionResetError where the other end is gone. A message is preceded by a mark, the number of its buffers and
    their lengths in bytes.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    @property
    def socket(self) -> socket.socket:
        """The socket, for sending descriptors with a message and for setting timeouts."""
        return self._end

    def fileno(self) -> int:
        """Returns the descriptor, for selectors."""
        return self._end.fileno()

    def readable(self, patience_s: float = 0.0) -> bool:
        """Returns True if a message begins to arrive, or the other end is closed, within `patience_s`."""
        return bool(self._poll.poll(1000 * patience_s))

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Sends one message; blocks until the kernel has accepted all of it."""
        lengths = [memoryview(buffer).nbytes for buffer in buffers]
        header = _MARK + struct.pack(f"<{len(lengths) + 1}Q", len(lengths), *lengths)
        if sum(lengths) < _SMALL:
            self._end.sendall(b"".join((header, *buffers)))
            return
        self._end.sendall(header)
        for buffer in buffers:
            self._end.sendall(buffer)

    def receive(self) -> list[bytearray]:
        """Returns the next message.

        Raises:
            EOFError: the other end was closed.
            GarbledError: something else than a message was written into the other end; nothing more can be read.
        """
        mark = self._read(len(_MARK))
        if mark != _MARK:
            raise GarbledError(f"{bytes(mark)!r} is not the start of a message")
        (count,) = struct.unpack("<Q", self._read(8))
        lengths = struct.unpack(f"<{count}Q", self._read(8 * count))
        return [self._read(length) for length in lengths]

    def close(self) -> None:
        """Closes this end; receiving at the other end raises EOFError."""
        self._end.close()

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        rest = memoryview(data)
        while rest:
            taken = self._end.recv_into(rest)
            if taken == 0:
                raise EOFError("the other end of the channel was closed")
            rest = rest[taken:]
        return data

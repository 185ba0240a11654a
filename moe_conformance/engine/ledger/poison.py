"""Hides the output of an asynchronous collective until the wait, so that an early use always fails.

The transport works on hidden buffers: it sends from copies and receives into separate memory. The caller's output holds
NaN, or a very large integer, until the wait, which copies the result into it. An early read therefore has the same
wrong result in every run, and a write into a buffer that the transport still uses is found by comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .entry import HazardKind
from .operators import Call, Operator


@dataclass(frozen=True)
class _Input:
    visible: torch.Tensor
    copy: torch.Tensor


@dataclass(frozen=True)
class _Output:
    visible: torch.Tensor
    hidden: torch.Tensor
    poison: torch.Tensor  # what `visible` held after the call


class Poisoned:
    """The hidden and visible buffers of one asynchronous call.

    Attributes:
        args: The operator's arguments with hidden buffers in place of the caller's.
    """

    def __init__(self, operator: Operator, args: tuple[Any, ...], call: Call) -> None:
        private = {id(tensor): _copy(tensor) for tensor in (*call.inputs, *call.outputs)}
        self.args = tuple(
            _replaced(arg, private) if at in (operator.given_at, operator.got_at) else arg
            for at, arg in enumerate(args)
        )
        originals = [(tensor.data, _copy(tensor)) for tensor in call.inputs]
        outputs = {id(tensor) for tensor in call.outputs}
        for tensor in call.outputs:
            _spoil(tensor.data)
        # An input may be part of an output, as in an in-place gather: that part may be read at any time.
        for tensor in call.inputs:
            if id(tensor) not in outputs:
                tensor.data.copy_(private[id(tensor)])
        self._inputs = [
            _Input(data, copy) for (data, copy), t in zip(originals, call.inputs, strict=True) if id(t) not in outputs
        ]
        self._outputs = [_Output(t.data, private[id(t)], _copy(t)) for t in call.outputs]

    def undo(self) -> None:
        """Restores the caller's buffers after the call itself has raised."""
        for output in self._outputs:
            output.visible.copy_(output.hidden)

    def deliver(self) -> list[HazardKind]:
        """Copies the results into the visible buffers; returns the hazards that the caller caused before."""
        kinds: list[HazardKind] = []
        if any(not _same(sent.visible, sent.copy) for sent in self._inputs):
            kinds.append("sent data changed")
        if any(not _same(output.visible, output.poison) for output in self._outputs):
            kinds.append("output written")
        for output in self._outputs:
            output.visible.copy_(output.hidden)
        return kinds


def can_poison(call: Call) -> bool:
    """Returns True if the buffers of a call can be hidden: asynchronous, on the CPU, contiguous."""
    tensors = (*call.inputs, *call.outputs)
    return call.asynchronous and all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)


def _replaced(tensors: Any, private: dict[int, torch.Tensor]) -> Any:
    if isinstance(tensors, torch.Tensor):
        return private.get(id(tensors), tensors)
    return [_replaced(inner, private) for inner in tensors]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.clone()


def _spoil(data: torch.Tensor) -> None:
    """Fills memory with NaN, or a very large integer; bool tensors stay as they are."""
    if data.is_floating_point() or data.is_complex():
        data.fill_(torch.nan)
    elif data.dtype != torch.bool:
        info = torch.iinfo(data.dtype)
        data.fill_(info.max if info.min == 0 else info.min)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns True if two tensors have the same bytes; NaN equals itself."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))

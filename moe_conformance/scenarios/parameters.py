"""Write parameters and read gradients through the windows of `named`, and check that these are views.

A window is a `Named`: a view of a parameter or of a part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from moe_conformance.contract import Named, Parametrised, Unsupported
from moe_conformance.scenarios.outcome import Grad
from moe_conformance.workloads.records.workload import ParameterKey

Hooked = list[tuple[Tensor, list[Tensor]]]  # parameters, with the sum of the gradients passed to the hook, if any


def _data(parameter: Tensor) -> Tensor:
    return parameter.detach()


def shard_of(full: Tensor, shard: tuple[int, int, int] | None) -> Tensor:
    """Return the chunk of a full parameter that a window (dim, index, of) holds; all of it without one."""
    if shard is None:
        return full
    dim, index, of = shard
    if full.shape[dim] % of:
        raise ValueError(f"dimension {dim} of {tuple(full.shape)} does not split into {of} shards")
    return full.chunk(of, dim)[index]


def write(surface: Parametrised, values: Mapping[ParameterKey, Tensor]) -> None:
    """Write the workload's value into every window.

    Raises:
        KeyError: the surface names something that the workload has no value for.
    """
    for window in surface.named(_data):
        key = (window.name, window.expert)
        if key not in values:
            raise KeyError(f"the adapter names {key}; the workload has values for {sorted(map(str, values))}")
        value = shard_of(values[key], window.shard)
        if tuple(window.view.shape) != tuple(value.shape):
            raise ValueError(f"the window on {key} has shape {tuple(window.view.shape)}, expected {tuple(value.shape)}")
        window.view.copy_(value)


def unask(surface: Parametrised) -> None:
    """Set requires_grad to False on all parameters.

    Raises:
        Unsupported: the windows show parts of parameters (of sharded ones, say), not the tensors that require grad.
    """
    changed: list[Tensor] = []  # a stacked tensor is read once for each of its experts

    def read(parameter: Tensor) -> Tensor:
        if not any(parameter is other for other in changed):
            if not parameter.requires_grad:
                raise Unsupported("the windows show parts of parameters, and not the tensors that ask for gradients")
            changed.append(parameter)
        return parameter.requires_grad_(False).detach()

    for _ in surface.named(read):
        pass


def hook(surface: Parametrised) -> Hooked:
    """Register a hook on every parameter that sums the gradients that autograd passes to it over all backwards.

    Raises:
        Unsupported: the surface shows parts of its parameters, or tensors of a class with special hooks (sharded
            ones), and not the tensors to which autograd passes gradients.
    """
    hooked: Hooked = []

    def read(parameter: Tensor) -> Tensor:
        if any(parameter is other for other, _ in hooked) or (
            type(parameter) is Tensor and not parameter.requires_grad
        ):
            return parameter.detach()  # read before, or a buffer
        if type(parameter) not in (Tensor, nn.Parameter) or not (parameter.is_leaf and parameter.requires_grad):
            raise Unsupported("the windows do not show the tensors to which autograd passes gradients")
        kept: list[Tensor] = []

        def keep(gradient: Tensor | None) -> None:
            if gradient is not None:  # it is None if a backward passes no gradient
                kept[:] = [kept[0] + gradient if kept else gradient.detach().clone()]

        parameter.register_hook(keep)
        hooked.append((parameter, kept))
        return parameter.detach()

    for _ in surface.named(read):
        pass
    return hooked


def passed_to_hooks(surfaces: Iterable[Parametrised], hooked: Iterable[Hooked]) -> dict[ParameterKey, Grad] | None:
    """Return the gradients passed to hooks, by window; `Grad(None)` for a parameter whose hook got none.

    None if there are no hooks.
    """
    found: dict[ParameterKey, Grad] = {}
    for surface, mine in zip(surfaces, hooked, strict=False):
        silent: list[Tensor] = []

        def read(parameter: Tensor, mine: Hooked = mine, silent: list[Tensor] = silent) -> Tensor:
            kept = next((kept for other, kept in mine if other is parameter), [])
            if not kept:
                silent.append(torch.zeros_like(parameter))
            return kept[0] if kept else silent[-1]

        for window in surface.named(read):
            absent = any(_inside(window.view, zeros) for zeros in silent)
            value = None if absent else window.view.detach().cpu().clone()
            found[window.name, window.expert] = Grad(value, window.shard)
    return found or None


def gradients(surfaces: Iterable[Parametrised], attribute: str) -> dict[ParameterKey, Grad]:
    """Return the gradients of every window; a parameter without one gives `Grad(None)`, not zeros."""
    found: dict[ParameterKey, Grad] = {}
    for surface in surfaces:
        stand_ins: list[Tensor] = []

        def read(parameter: Tensor, stand_ins: list[Tensor] = stand_ins) -> Tensor:
            grad: Tensor | None = getattr(parameter, attribute, None)
            if grad is None:
                grad = torch.zeros_like(parameter)
                stand_ins.append(grad)
            return grad.detach()

        for window in surface.named(read):
            absent = any(_inside(window.view, zeros) for zeros in stand_ins)
            value = None if absent else window.view.detach().cpu().clone()
            found[window.name, window.expert] = Grad(value, window.shard)
    return found


def cut_graphs(surfaces: Iterable[Parametrised]) -> None:
    """Detach the gradients of parameters from the graphs that a backward with create_graph left."""

    def read(parameter: Tensor) -> Tensor:
        if parameter.is_leaf and parameter.grad is not None and parameter.grad.requires_grad:
            parameter.grad = parameter.grad.detach()
        return parameter.detach()

    for surface in surfaces:
        for _ in surface.named(read):
            pass


def clear(surfaces: Iterable[Parametrised], attribute: str, *, to_zero: bool) -> None:
    """Clear the gradients between two steps, through the windows: to None, or to zero in place.

    They are always set to zero if the gradient attribute is not `grad`, as that buffer belongs to the backend, and if a
    window shows a part of a (sharded) parameter, and not the tensor that autograd gives the gradient to.
    """

    def read(parameter: Tensor) -> Tensor:
        grad: Tensor | None = getattr(parameter, attribute, None)
        if grad is not None and (to_zero or attribute != "grad" or not parameter.requires_grad):
            grad.detach().zero_()
        elif grad is not None:
            parameter.grad = None
        return parameter.detach()

    for surface in surfaces:
        for _ in surface.named(read):
            pass


def coverage(surface: Parametrised) -> tuple[str, ...]:
    """Return a sentence for every parameter or window that breaks the rules of `named`.

    A window must be a view of the parameter that was read for it, windows must not overlap, and together they must
    cover every element.
    """
    read: list[Tensor] = []

    def note(parameter: Tensor) -> Tensor:
        if not any(parameter is other for other in read):
            read.append(parameter)
        return parameter.detach()

    complaints = []
    windows = list(surface.named(note))
    for window in windows:
        if window.view.numel() and not any(_inside(window.view, parameter) for parameter in read):
            complaints.append(f"the window on {_said(window)} is a copy, not a view")
    for parameter in read:
        seen = torch.zeros(parameter.shape, dtype=torch.int32)
        mine = [window.view for window in windows if _inside(window.view, parameter)]
        for view in mine:
            _same_region(seen, parameter, view).add_(1)
        for count, words in ((int((seen == 0).sum()), "no window"), (int((seen > 1).sum()), "several windows")):
            if count:
                complaints.append(f"{count} elements of a {tuple(parameter.shape)} parameter have {words}")
    return tuple(complaints)


def _same_region(twin: Tensor, parameter: Tensor, view: Tensor) -> Tensor:
    """Return the view of `twin` at the place where `view` lies in the parameter.

    `twin` is contiguous and has the shape of the parameter, which has to be contiguous too, as in all libraries.
    """
    if not parameter.is_contiguous():
        raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is not contiguous")
    offset = view.storage_offset() - parameter.storage_offset()
    return twin.as_strided(view.shape, view.stride(), offset)


def _inside(view: Tensor, whole: Tensor) -> bool:
    """Return whether a view starts within the memory of a contiguous tensor (several may share one storage)."""
    start, size = whole.data_ptr(), whole.numel() * whole.element_size()
    return start <= view.data_ptr() < start + size


def _said(window: Named) -> str:
    return window.name if window.expert is None else f"{window.name} of expert {window.expert}"

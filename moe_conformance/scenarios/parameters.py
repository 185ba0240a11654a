"""Writing parameters and reading gradients through the windows of `named`, and checking that they are windows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from moe_conformance.contract import Named, Parametrised, Unsupported
from moe_conformance.scenarios.outcome import Grad
from moe_conformance.workloads.records.workload import ParameterKey

Hooked = list[tuple[Tensor, list[Tensor]]]  # parameters, each with the sum of what its hook was passed, if it was


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
    """Fill every window with its value.

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
    """Have no parameter ask for a gradient.

    Raises:
        Unsupported: the surface shows parts of its parameters (of sharded ones, say), and not what asks.
    """
    asked: list[Tensor] = []  # the experts of a stacked tensor read it once each

    def read(parameter: Tensor) -> Tensor:
        if not any(parameter is each for each in asked):
            if not parameter.requires_grad:
                raise Unsupported("the windows show parts of parameters, and not the tensors that ask for gradients")
            asked.append(parameter)
        return parameter.requires_grad_(False).detach()

    for _ in surface.named(read):
        pass


def hook(surface: Parametrised) -> Hooked:
    """Have the gradients that autograd passes to hooks of every parameter be kept, as the sum over all backwards.

    Raises:
        Unsupported: the surface shows parts of its parameters, or tensors of a class whose hooks are its own (sharded
            ones), and not the tensors to which autograd passes gradients.
    """
    hooked: Hooked = []

    def read(parameter: Tensor) -> Tensor:
        if any(parameter is each for each, _ in hooked) or (type(parameter) is Tensor and not parameter.requires_grad):
            return parameter.detach()  # read before, or a buffer
        if type(parameter) not in (Tensor, nn.Parameter) or not (parameter.is_leaf and parameter.requires_grad):
            raise Unsupported("the windows do not show the tensors to which autograd passes gradients")
        kept: list[Tensor] = []

        def keep(gradient: Tensor | None) -> None:
            if gradient is not None:  # it is where a backward hands nothing on
                kept[:] = [kept[0] + gradient if kept else gradient.detach().clone()]

        parameter.register_hook(keep)
        hooked.append((parameter, kept))
        return parameter.detach()

    for _ in surface.named(read):
        pass
    return hooked


def passed_to_hooks(surfaces: Iterable[Parametrised], hooked: Iterable[Hooked]) -> dict[ParameterKey, Grad] | None:
    """Return what hooks were passed, of every window; `Grad(None)` of a parameter whose hook was passed none.

    None where nothing has hooks.
    """
    found: dict[ParameterKey, Grad] = {}
    for surface, mine in zip(surfaces, hooked, strict=False):
        silent: list[Tensor] = []

        def read(parameter: Tensor, mine: Hooked = mine, silent: list[Tensor] = silent) -> Tensor:
            kept = next((kept for each, kept in mine if each is parameter), [])
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
    """Drop the graphs that a backward with create_graph has left at the gradients of parameters."""

    def read(parameter: Tensor) -> Tensor:
        if parameter.is_leaf and parameter.grad is not None and parameter.grad.requires_grad:
            parameter.grad = parameter.grad.detach()
        return parameter.detach()

    for surface in surfaces:
        for _ in surface.named(read):
            pass


def clear(surfaces: Iterable[Parametrised], attribute: str, *, to_zero: bool) -> None:
    """Clear the gradients between two steps, through the windows: to None, or to zero in place.

    To zero in any case where a gradient lies under another name than `grad`, in a buffer that belongs to the backend,
    and where the surface shows a part of a parameter, of sharded ones, and not the tensor that autograd gives it.
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
    """Return a sentence for every way in which the windows are not windows on all there is.

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
    """Return the part of `twin` (contiguous, shaped like the parameter) that `view` is of the parameter.

    Only for contiguous parameters, which is what libraries hold.
    """
    if not parameter.is_contiguous():
        raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is not contiguous")
    offset = view.storage_offset() - parameter.storage_offset()
    return twin.as_strided(view.shape, view.stride(), offset)


def _inside(view: Tensor, whole: Tensor) -> bool:
    """Whether a view starts within the memory of a contiguous tensor (several may share one storage)."""
    start, size = whole.data_ptr(), whole.numel() * whole.element_size()
    return start <= view.data_ptr() < start + size


def _said(window: Named) -> str:
    return window.name if window.expert is None else f"{window.name} of expert {window.expert}"

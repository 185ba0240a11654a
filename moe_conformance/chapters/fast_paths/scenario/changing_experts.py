"""A backend's experts for scripts, which call them on rows and change their parameters between two calls.

N experts of this rank, D hidden, R rows. Changes are made through the windows of `named` and the module that holds the
parameters, as training, loading and moving a model make them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_conformance.contract import Delivery, Named, Read, Session, Unsupported
from moe_conformance.engine import RankContext
from moe_conformance.scenarios import parameters
from moe_conformance.scenarios.outcome import Grad
from moe_conformance.scenarios.sessions import Opened, build
from moe_conformance.scenarios.tensors import laid_out
from moe_conformance.workloads.records.changes import OF_SHARDS, OF_THE_MODULE, Values, Way
from moe_conformance.workloads.records.draw import weight_dtype
from moe_conformance.workloads.records.workload import Stride, Workload


def require_sorted_rows(experts: Any, workload: Workload) -> None:
    """Raise Unsupported if experts, which are not used afterwards, do not take rows sorted by expert.

    Experts that take another form get it from the backend's exchange. They are tried with one row and with gradients: a
    failure without gradients must be left to the checks of that.

    Raises:
        Unsupported: a call with sorted rows raises.
    """
    config = workload.config
    row_RD = torch.zeros(1, config.hidden, dtype=config.dtype)
    counts_N = [1] + [0] * (config.experts // workload.layout.ep - 1)
    try:
        experts(Delivery.grouped(row_RD, counts_N, torch.ones(1, dtype=weight_dtype(config.dtype))))
    except Exception as error:
        raise Unsupported(f"the experts take no rows sorted by expert: {type(error).__name__}: {error}") from error


class ChangingExperts:
    """The surface of scripts that change parameters of experts.

    Values are full parameters by name and global expert id, of which a rank uses its part. They are those of all
    parameters, except for "copy_", which may change some.
    """

    def __init__(self, experts: Any, session: Session, workload: Workload, rank: int) -> None:
        """Keep the experts, and check that every change of the script is possible.

        Raises:
            Unsupported: a change needs the module, which the surface does not show; or the windows show parts of
                parameters, and not the parameters to change.
        """
        self._experts, self._attribute = experts, session.grad_attr
        ways = {call.given[rank]["way"] for call in workload.calls if call.method == "change"}
        if self._module() is None and ways & {*OF_THE_MODULE}:
            raise Unsupported("the experts show no `module` that holds their parameters")
        if ways - {*OF_SHARDS} and not self._shows_parameters():
            raise Unsupported("the windows show parts of parameters, and not the parameters themselves")

    @property
    def resolved(self) -> Mapping[str, str]:
        """What the experts report now."""
        return {} if self._experts is None else dict(self._experts.resolved)

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the windows of the experts."""
        windows: Iterator[Named] = self._experts.named(read)
        return windows

    # ---- calls -----------------------------------------------------------------------------------------------

    def forward(
        self, rows_RD: Tensor, counts_N: tuple[int, ...], known: bool = True, stride: Stride | None = None
    ) -> Tensor:
        """Return the expert output for rows sorted by expert, with weights of 1.

        Unless counts are `known` the delivery has ids only. `stride` is the memory layout of rows and upstream
        gradient.
        """
        given_RD = rows_RD if stride is None else laid_out(rows_RD, stride)
        weights_R = torch.ones(len(rows_RD), dtype=weight_dtype(rows_RD.dtype), device=rows_RD.device)
        if known:
            delivery = Delivery.grouped(given_RD, counts_N, weights_R)
        else:
            ids_R = torch.arange(len(counts_N)).repeat_interleave(torch.tensor(counts_N))
            delivery = Delivery.listed(given_RD, ids_R[:, None].to(rows_RD.device), weights_R[:, None])
        out_RD: Tensor = self._experts(delivery)
        return out_RD if stride is None or not out_RD.requires_grad else _laid_out_backward(out_RD, stride)

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients of all parameters of this rank, None for one without, and clear them."""
        found = {_said(key): grad.value for key, grad in self._gradients().items()}
        parameters.clear([self], self._attribute, to_zero=False)
        return found

    def change(self, way: Way, values: Values) -> None:
        """Change the parameters in one of the ways; call `weights_changed()` after a change that leaves no trace."""
        _WAYS[way](self, values)
        announce = getattr(self._experts, "weights_changed", None)
        if announce is not None and way in _ANNOUNCED:
            announce()

    def remains(self, marker: float) -> int:
        """Return how many storages, except those of the present parameters, hold an element of this value."""
        gc.collect()
        present = (
            {item.untyped_storage().data_ptr() for item in self._parameters()} if self._experts is not None else set()
        )
        found = {
            item.untyped_storage().data_ptr()
            for item in gc.get_objects()
            if isinstance(item, Tensor) and _holds(item, marker) and item.untyped_storage().data_ptr() not in present
        }
        return len(found)

    def delete(self) -> None:
        """Drop the reference to the experts."""
        self._experts = None

    # ---- what changes are made of ----------------------------------------------------------------------------

    def _module(self) -> nn.Module | None:
        if isinstance(self._experts, nn.Module):
            return self._experts
        module: nn.Module | None = getattr(self._experts, "module", None)
        return module

    def _modules(self) -> nn.Module:
        module = self._module()
        assert module is not None  # or it would not have been built
        return module

    def _shows_parameters(self) -> bool:
        """Whether the windows are on the parameters themselves.

        The local tensor of a DTensor is another object each time, and for `isinstance` a Parameter all the same.
        """
        first, second = self._parameters(), self._parameters()
        same = len(first) == len(second) and all(one is other for one, other in zip(first, second, strict=True))
        return same and all(isinstance(parameter, nn.Parameter) for parameter in first)

    def _parameters(self) -> list[Tensor]:
        read: list[Tensor] = []

        def note(parameter: Tensor) -> Tensor:
            if not any(parameter is other for other in read):
                read.append(parameter)
            return parameter.detach()

        for _ in self.named(note):
            pass
        return read

    def _write(self, values: Values, read: Read, put: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
        """Write values into the windows on the result of `read`; windows without a value are unchanged."""
        for window in self.named(read):
            key = (window.name, window.expert)
            if key in values:
                value = parameters.shard_of(values[key], window.shard)
                put(window.view, value.to(window.view.device, window.view.dtype))

    def _gradients(self) -> Mapping[tuple[str, int | None], Grad]:
        return parameters.gradients([self], self._attribute)

    def _filled(self, values: Values) -> list[tuple[Tensor, Tensor]]:
        """Return every parameter with a new tensor of its shape that holds the new values."""
        made: list[tuple[Tensor, Tensor]] = []

        def read(parameter: Tensor) -> Tensor:
            for known, filled in made:
                if parameter is known:
                    return filled
            made.append((parameter, torch.empty_like(parameter, requires_grad=False)))
            return made[-1][1]

        self._write(values, read)
        return made

    def _replace(self, made: Iterable[tuple[Tensor, nn.Parameter]]) -> None:
        new = [(old, parameter) for old, parameter in made]
        for module in self._modules().modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                for old, replacement in new:
                    if parameter is old:
                        setattr(module, name, replacement)


def _copy(experts: ChangingExperts, values: Values) -> None:
    experts._write(values, Tensor.detach)


def _add(experts: ChangingExperts, values: Values) -> None:
    experts._write(values, Tensor.detach, lambda view, value: view.sub_(view.clone()).add_(value))


def _load(experts: ChangingExperts, values: Values) -> None:
    module, filled = experts._modules(), experts._filled(values)
    state = {
        name: next((new for old, new in filled if parameter is old), parameter.detach())
        for name, parameter in module.named_parameters()
    }
    module.load_state_dict(state, strict=False)


def _step(experts: ChangingExperts, values: Values, *, fused: bool = False) -> None:
    """Run an optimizer step of size 1 with gradients that lead exactly to the values, which have few digits."""
    filled = experts._filled(values)
    for parameter, new in filled:
        parameter.grad = (parameter.detach() - new).to(getattr(parameter, "grad_dtype", None) or parameter.dtype)
    torch.optim.SGD([parameter for parameter, _ in filled], lr=1.0, fused=fused, foreach=False).step()
    for parameter, _ in filled:
        parameter.grad = None


def _fused_step(experts: ChangingExperts, values: Values) -> None:
    _step(experts, values, fused=True)


def _copy_data(experts: ChangingExperts, values: Values) -> None:
    experts._write(values, lambda parameter: parameter.data)


def _new_data(experts: ChangingExperts, values: Values) -> None:
    """Replace the data of the parameters; the old memory is freed first, so that addresses may be the same."""
    for parameter in experts._parameters():
        like = torch.empty_like(parameter, device="meta")
        parameter.data = torch.empty(0, dtype=like.dtype, device=parameter.device)
        parameter.data = torch.empty_like(like, device=parameter.device)
    _copy_data(experts, values)


def _write_in_inference_mode(experts: ChangingExperts, values: Values) -> None:
    """Make the parameters inference tensors, unless they are, and write to them in inference mode."""
    with torch.inference_mode():
        old = experts._parameters()
        if not all(parameter.is_inference() for parameter in old):
            experts._replace(
                [
                    (old_parameter, nn.Parameter(old_parameter.detach().clone(), requires_grad=False))
                    for old_parameter in old
                ]
            )
        _copy(experts, values)


def _new_parameters(experts: ChangingExperts, values: Values) -> None:
    experts._replace([(old, nn.Parameter(new)) for old, new in experts._filled(values)])


def _cast_and_back(experts: ChangingExperts, values: Values) -> None:
    module = experts._modules()
    dtype = next(module.parameters()).dtype
    module.to(torch.float64 if dtype == torch.float32 else torch.float32)
    _copy(experts, values)
    module.to(dtype)


def _to_empty(experts: ChangingExperts, values: Values) -> None:
    module = experts._modules()
    module.to_empty(device=next(module.parameters()).device)
    _copy(experts, values)


def _gathered_again(experts: ChangingExperts, values: Values) -> None:
    """Free the gathered parameters, as after a backward, and change the shards; the next forward gathers again."""
    reshard = getattr(experts._experts, "reshard", None)
    if reshard is not None:
        reshard()
    _copy(experts, values)


_WAYS: Mapping[Way, Callable[[ChangingExperts, Values], None]] = {
    "copy_": _copy,
    "add_": _add,
    "load_state_dict": _load,
    "a step of an optimiser": _step,
    ".data.copy_": _copy_data,
    ".data = a new tensor": _new_data,
    "a step of a fused optimiser": _fused_step,
    "a write in inference mode": _write_in_inference_mode,
    "a new Parameter": _new_parameters,
    "to another dtype and back": _cast_and_back,
    "to_empty": _to_empty,
    "gathered again": _gathered_again,
}
_ANNOUNCED: tuple[Way, ...] = (
    ".data.copy_",
    ".data = a new tensor",
    "a step of a fused optimiser",
    "a write in inference mode",
)


def _said(key: tuple[str, int | None]) -> str:
    return f"{key[0]} of expert {key[1]}"


def _holds(tensor: Tensor, marker: float) -> bool:
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_floating_point() or tensor.layout != torch.strided:
        return False
    return bool((tensor.detach() == marker).any()) if tensor.device.type != "meta" else False


class _LaidOut(torch.autograd.Function):
    """Identity whose backward returns the gradient with other strides."""

    @staticmethod
    def forward(ctx: Any, out_RD: Tensor, stride: Stride) -> Tensor:
        ctx.stride = stride
        return out_RD.view_as(out_RD)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return laid_out(upstream[0], ctx.stride), None


def _laid_out_backward(out_RD: Tensor, stride: Stride) -> Tensor:
    laid: Tensor = _LaidOut.apply(out_RD, stride)  # type: ignore[no-untyped-call]
    return laid


def sorted_experts(session: Session, workload: Workload) -> Any:
    """Build the backend's experts, after checking on another build that they take rows sorted by expert.

    Raises:
        Unsupported: they are not offered, or take rows in another form.
    """
    require_sorted_rows(build(session, "experts", workload.config), workload)
    return build(session, "experts", workload.config)


def changing_experts(kept: Opened, workload: Workload, context: RankContext) -> ChangingExperts:
    """Build the backend's experts, for a script that changes their parameters between calls."""
    return ChangingExperts(sorted_experts(kept.session, workload), kept.session, workload, context.rank)


SCRIPT_SURFACES = {"changing_experts": changing_experts}

"""Make one call of a script: under grad modes and settings, on tensors without data, exported or compiled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from moe_conformance.scenarios.outcome import Memory
from moe_conformance.workloads.records.workload import Mode, Through


@contextmanager
def under(modes: Sequence[Mode]) -> Iterator[None]:
    """Enter modes, outermost first, and restore the deterministic setting afterwards.

    The debug mode is set, since `torch.use_deterministic_algorithms` imports a compiler: a second in every process.
    """
    before = torch.get_deterministic_debug_mode()
    with ExitStack() as stack:
        for mode in modes:
            if mode.startswith("deterministic"):
                torch.set_deterministic_debug_mode("warn" if "warn" in mode else "error")
            else:
                stack.enter_context(getattr(torch, mode)())
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)


def deterministic_setting() -> tuple[bool, bool]:
    """Return whether torch uses deterministic algorithms, and whether it only warns where it has none."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


class _Method(nn.Module):
    """Wraps a method of a surface as a module, since torch exports modules only."""

    def __init__(self, method: Callable[..., Tensor]) -> None:
        super().__init__()
        self.method = method

    def forward(self, *arguments: Tensor) -> Tensor:
        return self.method(*arguments)


def call_through(through: Through, method: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a method with its arguments by name, or by position if its parameters have other names.

    On tensors without data (fake, meta) the result has none. An export and a compilation as one graph may fail; their
    exceptions propagate.
    """
    given = tuple(arguments.values())
    if through == "":
        return method(**arguments) if _has_parameters(method, arguments) else method(*given)
    if through == "meta":
        return method(*(given_tensor.to("meta") for given_tensor in given))
    if through == "fake":
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode() as fake:
            return method(*(fake.from_tensor(given_tensor) for given_tensor in given))
    if through == "export":
        program = torch.export.export(_Method(method), given)
        return program.module()(*given)
    compiled = torch.compile(_Method(method), fullgraph=True, backend="aot_eager")
    return compiled(*given)


def takes(method: Callable[..., Any], names: Sequence[str]) -> bool:
    """Return whether a method has a parameter for each of these arguments, by name or by position.

    One that asks for more arguments takes these: its call raises, which is a failure.

    >>> takes(lambda rows, handle: rows, ("rows", "handle", "biases"))
    False
    """
    try:
        signature = inspect.signature(method)
    except ValueError:  # it is not written in Python
        return True
    for by_position, by_name in (((), dict.fromkeys(names)), (names, {})):
        with suppress(TypeError):
            signature.bind_partial(*by_position, **by_name)
            return True
    return False


def _has_parameters(method: Callable[..., Any], names: Iterable[str]) -> bool:
    """Return whether a method can be called with arguments of these names, or has no signature."""
    try:
        inspect.signature(method).bind(**dict.fromkeys(names))
    except TypeError:
        return False
    except ValueError:  # it is not written in Python
        return True
    return True


def form_of(returned: Any, through: Through, device: torch.device) -> dict[str, Any]:
    """Return shape, dtype and device type of a tensor without data, and the device type of the arguments."""
    return {
        "shape": tuple(returned.shape),
        "dtype": returned.dtype,
        "device": returned.device.type,
        "device given": "meta" if through == "meta" else torch.device(device).type,
    }


def memory_of(returned: Any, arguments: Mapping[str, Tensor]) -> dict[str, Memory]:
    """Return whether a returned tensor is, or shares bytes with, each tensor argument, by argument."""
    if not isinstance(returned, Tensor):
        return {}
    return {
        name: "same tensor" if returned is held else "shared" if _share_bytes(returned, held) else "apart"
        for name, held in arguments.items()
    }


def _share_bytes(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have a byte in common, also if their storages differ.

    The addresses of all bytes are compared only if those of the first and last bytes do not decide.
    """
    (first_a, last_a), (first_b, last_b) = _extent(a), _extent(b)
    if first_a > last_b or first_b > last_a:
        return False
    return (a.is_contiguous() and b.is_contiguous()) or bool(torch.isin(_bytes(a), _bytes(b)).any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first and the last byte of a strided tensor; (1, 0) for an empty one."""
    if not tensor.numel():
        return 1, 0
    steps = (
        (size - 1) * stride * tensor.element_size() for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), tensor.data_ptr() + sum(steps) + tensor.element_size() - 1


def _bytes(tensor: Tensor) -> Tensor:
    """Return the address of every byte of a strided tensor, once for each element that contains it."""
    step = tensor.element_size()
    at = torch.tensor([tensor.data_ptr()])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        at = (at[:, None] + torch.arange(size) * stride * step).flatten()
    return (at[:, None] + torch.arange(step)).flatten()

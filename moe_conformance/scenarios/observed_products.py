"""Record the matrix products of a rank while collectives are in flight, and its in-place writes to gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_conformance.contract import Parametrised, Read

_PRODUCTS = frozenset(
    ["mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm", "_addmm_activation"]
)
_OF_TORCH = frozenset(["aten", "prim", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd"])

Product = tuple[int, str, tuple[tuple[int, ...], ...]]  # collectives that were called before it, operator, shapes


class Places:
    """The memory ranges of the windows of layers, which `read` maps to parameters or gradients."""

    def __init__(self, layers: Iterable[Parametrised], read: Read) -> None:
        """Record the memory range of every window of all layers."""
        self._places: list[tuple[int, int, str]] = []
        for number, layer in enumerate(layers):
            for window in layer.named(read):
                start = 0 if window.view.is_meta else window.view.data_ptr()
                size = window.view.numel() * window.view.element_size()
                if start and size:
                    self._places.append((start, start + size, f"layer {number}: {window.name}"))

    def named(self, tensor: Tensor) -> list[str]:
        """Return the layers and names of the windows whose memory overlaps that of a tensor."""
        if tensor.is_meta or not tensor.numel():
            return []
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
        names = (name for start, stop, name in self._places if begin <= start < end or start <= begin < stop)
        return list(dict.fromkeys(names))


class Observed(TorchDispatchMode):
    """A dispatch mode that records products and writes to gradients.

    Attributes:
        during: The weights in the products that ran while a collective was in flight, by its number.
        worked: Whether any product ran.
        trace: Of every product the number of collectives that were called before it, its operator and shapes.
        gradients: The memory ranges of gradients, if writes to them are recorded.
        written: The names of gradients in the order in which they were written in place.
    """

    def __init__(
        self,
        calls: Callable[[], int],
        in_flight: Callable[[], tuple[int, ...]],
        weights: Places,
        delay: Callable[[], None],
    ) -> None:
        """Keep the queries of collectives, called and in flight, the ranges of weights, and a call before operators."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls, self._begun = calls, calls()
        self._in_flight, self._weights, self._delay = in_flight, weights, delay
        self.during: dict[int, list[str]] = defaultdict(list)
        self.worked = False
        self.trace: list[Product] = []
        self.gradients: Places | None = None
        self.written: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler for this mode, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor around others: its own operators come by again
        self._delay()
        namespace, _, name = func._schema.name.partition("::")
        if name in _PRODUCTS or namespace not in _OF_TORCH:
            self._product(name, args)
        elif self.gradients is not None and name.endswith("_") and args and isinstance(args[0], Tensor):
            self.written += self.gradients.named(args[0])
        return func(*args, **(kwargs or {}))

    def _product(self, name: str, args: Sequence[Any]) -> None:
        tensors = [tensor for tensor in args if isinstance(tensor, Tensor)]
        if not tensors or not all(tensor.numel() for tensor in tensors):
            return
        self.worked = True
        self.trace.append((self._calls() - self._begun, name, tuple(tuple(tensor.shape) for tensor in tensors)))
        in_flight = self._in_flight()
        names = [name for tensor in tensors for name in self._weights.named(tensor)] if in_flight else []
        for order in in_flight:
            self.during[order] += names or ["no weight"]

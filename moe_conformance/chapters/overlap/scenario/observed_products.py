"""What a rank computes while collectives are in flight, and which gradients it writes: every operator is looked at."""

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


class Places:
    """Where the windows of layers lie in memory, as `read` returns what is behind them."""

    def __init__(self, layers: Iterable[Parametrised], read: Read) -> None:
        """Ask all layers."""
        self._places: list[tuple[int, int, str]] = []
        for number, layer in enumerate(layers):
            for window in layer.named(read):
                start = 0 if window.view.is_meta else window.view.data_ptr()
                size = window.view.numel() * window.view.element_size()
                if start and size:
                    self._places.append((start, start + size, f"layer {number}: {window.name}"))

    def named(self, tensor: Tensor) -> list[str]:
        """Return the layers and names of the windows that begin in a tensor, or that hold where it begins."""
        if tensor.is_meta or not tensor.numel():
            return []
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
        names = (name for start, stop, name in self._places if begin <= start < end or start <= begin < stop)
        return list(dict.fromkeys(names))


class Observed(TorchDispatchMode):
    """Looks at every operator while it is entered.

    Attributes:
        during: By the number of a collective, for each product that ran while it was in flight, the weights in it.
        worked: Whether any product ran.
        gradients: Where gradients lie, if writes to them are to be seen.
        written: The names of gradients in the order in which they were written in place.
    """

    def __init__(self, in_flight: Callable[[], tuple[int, ...]], weights: Places, delay: Callable[[], None]) -> None:
        """Take what is in flight, where weights lie, and what is done before every operator."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._in_flight, self._weights, self._delay = in_flight, weights, delay
        self.during: dict[int, list[str]] = defaultdict(list)
        self.worked = False
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
            self._product(args)
        elif self.gradients is not None and name.endswith("_") and args and isinstance(args[0], Tensor):
            self.written += self.gradients.named(args[0])
        return func(*args, **(kwargs or {}))

    def _product(self, args: Sequence[Any]) -> None:
        tensors = [each for each in args if isinstance(each, Tensor)]
        if not tensors or not all(each.numel() for each in tensors):
            return
        self.worked = True
        in_flight = self._in_flight()
        names = [name for each in tensors for name in self._weights.named(each)] if in_flight else []
        for order in in_flight:
            self.during[order] += names or ["no weight"]

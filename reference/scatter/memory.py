"""Memory: whether two tensors lie over the same bytes, and so whether one may be written in place.

A view is an address, a shape and strides; nothing else decides, neither who owns the storage nor which
library made it. Address ranges of two views may meet where no byte is shared (interleaved columns), so bytes
are counted one by one: keep the views small.

Sources: arithmetic of strides; PyTorch documentation of tensor views.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from torch import Tensor


@dataclass(frozen=True)
class View:
    """Where elements lie.

    `address` is that of element (0, ..., 0) in bytes, None if there is no data (fake and meta tensors);
    `strides` are in elements and may be 0 or negative; `itemsize` is in bytes.
    """

    address: int | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def view_of(tensor: Tensor) -> View:
    """Read where a tensor lies; without data, on the meta device or fake, it has no address.

    >>> import torch
    >>> buffer = torch.zeros(3, 5)
    >>> view = view_of(buffer[1:, 2])
    >>> view.address - buffer.data_ptr(), view.shape, view.strides, view.itemsize
    (28, (2,), (5,), 4)
    >>> view_of(torch.zeros(2, device="meta")).address is None
    True
    """
    # A fake tensor says that it is on the device it stands for; its storage says that it is on none.
    address = None if tensor.untyped_storage().device.type == "meta" else tensor.data_ptr()
    return View(address, tuple(tensor.shape), tensor.stride(), tensor.element_size())


def addresses(view: View) -> frozenset[int]:
    """List every byte that an element of the view lies on.

    Degenerate: an empty view, or one without data, has none. No dims at all is one element.

    >>> sorted(addresses(View(100, (2, 2), (3, 0), 2)))
    [100, 101, 106, 107]
    """
    return frozenset(first + byte for first in _elements(view) for byte in range(view.itemsize))


def share_bytes(a: View, b: View) -> bool:
    """Return whether a write through one view may show through the other (ALIAS-05).

    Rule: they share a byte. Views of one storage need not; views of two storages over one memory do.

    Degenerate: an empty view and one without data share nothing.

    >>> even, odd = View(0, (4,), (2,), 4), View(4, (4,), (2,), 4)  # interleaved columns
    >>> share_bytes(even, odd), share_bytes(even, View(6, (1,), (1,), 4))
    (False, True)
    """
    return not addresses(a).isdisjoint(addresses(b))


def overlaps_itself(view: View) -> bool:
    """Return whether two elements of a view share a byte, as in an expanded one.

    >>> overlaps_itself(View(0, (3, 2), (0, 1), 4)), overlaps_itself(View(0, (1, 2), (0, 1), 4))
    (True, False)
    """
    return len(addresses(view)) < len(_elements(view)) * view.itemsize


def in_place_is_lawful(out: View, x: View) -> bool:
    """Return whether adding into `out` in place would leave the bytes of `x` alone (ALIAS-04, ALIAS-05).

    Rule: they share no byte and `out` does not overlap itself. Then either choice is allowed, else only the
    out-of-place one.

    Decides: ALIAS-05. Source: arithmetic of strides.

    >>> x = View(0, (2, 3), (3, 1), 4)
    >>> in_place_is_lawful(x, x), in_place_is_lawful(View(24, (2, 3), (3, 1), 4), x)
    (False, True)
    """
    return not share_bytes(out, x) and not overlaps_itself(out)


def _elements(view: View) -> list[int]:
    """List the address of the first byte of every element."""
    _check(view)
    if view.address is None:
        return []
    at = []
    for index in product(*(range(size) for size in view.shape)):
        at.append(view.address + sum(i * stride for i, stride in zip(index, view.strides, strict=True)) * view.itemsize)
    return at


def _check(view: View) -> None:
    """Raise where a view makes no sense."""
    if len(view.shape) != len(view.strides) or any(size < 0 for size in view.shape) or view.itemsize < 1:
        raise ValueError(f"{view}: needs a stride for every size, no negative size, and a byte per element")

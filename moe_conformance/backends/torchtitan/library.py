"""What differs between the versions of torchtitan that the adapter supports, found by looking at the library's objects.

0.3.0, and the checkouts before 20 August 2026: MoE modules take [batch, sequence, D]. The checkouts since: they take
(T, D), the tokens of all sequences one after the other. Their version.txt says 0.2.2.
"""

from __future__ import annotations

from inspect import signature

from torch import Tensor, nn


def given(module: nn.Module, x: Tensor) -> Tensor:
    """Return tokens, in rows or in sequences, as the forward of a module takes them.

    The library names the dimensions of a tensor in the name of the parameter. Rows without a batch are a batch of one.
    """
    if "x_TD" in signature(type(module).forward).parameters:  # that of the module may be wrapped
        return x.flatten(0, -2)
    return x if x.dim() == 3 else x[None]

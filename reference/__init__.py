"""The oracles: what an MoE layer must compute, on one device, in float64, one chapter a file.

Every function is free, pure and short enough to check by eye. Floating inputs are cast up to float64, ids
stay int64, and autograd gives gradients where a function says that it is differentiable. Nothing here
imports the suite.

Shapes by letter: T tokens on a rank, K slots per token, E experts, G groups of experts, D hidden, F expert
hidden, R rows, W ranks. An id of -1 is an empty slot.
"""

from __future__ import annotations

if __name__ != "moe_conformance.reference":
    raise ImportError("import it as moe_conformance.reference: under two names every class would be there twice")

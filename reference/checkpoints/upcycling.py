"""Upcycling and moving: experts made from a dense MLP, and experts that change their places.

Copies of one MLP compute what it computed, if a token's weights sum to one; and which place holds a copy
decides nothing.

Sources: Komatsuzaki et al. 2022 (Sparse Upcycling); DeepSeek-V3 section 3.4 (redundant experts).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_conformance.reference.experts import Parameters, swiglu


def upcycle(
    gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor, experts: int, *, pieces: int = 1
) -> dict[tuple[str, int], Tensor]:
    """Make E experts from one MLP, by (name, expert): copies, or pieces of copies.

    Rule: expert e = copy * pieces + piece has, of F hidden units, those from piece * F/pieces on: rows of gate
    and up, columns of down. The pieces of one copy add up to the MLP. Bits are kept.

    Degenerate: pieces = 1 makes every expert the MLP itself.

    Raises:
        ValueError: no expert, experts that are no whole number of copies, or F not a multiple of the pieces.

    Decides: CKPT-12. Source: Komatsuzaki et al. 2022.

    >>> import torch
    >>> made = upcycle(torch.tensor([[1], [2]]), torch.tensor([[3], [4]]), torch.tensor([[5, 6]]), 4, pieces=2)
    >>> [(made["gate", e].tolist(), made["down", e].tolist()) for e in range(4)]
    [([[1]], [[5]]), ([[2]], [[6]]), ([[1]], [[5]]), ([[2]], [[6]])]
    """
    F = gate_FD.shape[0]
    if experts < 1 or pieces < 1 or experts % pieces or F % pieces:
        raise ValueError(f"{experts} experts in {pieces} pieces of F = {F}: pieces must divide both, both positive")
    made: dict[tuple[str, int], Tensor] = {}
    for e in range(experts):
        first = e % pieces * (F // pieces)
        units = slice(first, first + F // pieces)
        made["gate", e], made["up", e], made["down", e] = gate_FD[units], up_FD[units], down_DF[:, units]
    return made


def upcycled_output(x_TD: Tensor, weights_TK: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    """Compute what a layer of whole copies gives, (T, D) -> (T, D): (sum_k w_tk) MLP(x_t), whatever the ids.

    Differentiable in everything. For no empty slots, and weights at the output.

    Degenerate: weights that sum to one give the MLP; K = 1 with weight 1 too.

    Raises:
        ValueError: weights of another number of tokens.

    Decides: CKPT-12. Source: Komatsuzaki et al. 2022.

    >>> import torch
    >>> x, one = torch.tensor([[20.0]]), torch.ones(1, 1)
    >>> upcycled_output(x, torch.tensor([[0.5, 0.25]]), one, one, one).round().tolist()
    [[300.0]]
    """
    if weights_TK.shape[0] != x_TD.shape[0]:
        raise ValueError(f"weights of {weights_TK.shape[0]} tokens for x of {x_TD.shape[0]}")
    return weights_TK.double().sum(dim=1, keepdim=True) * swiglu(x_TD, gate_FD, up_FD, down_DF)  # (T, D)


def at_places(parameters: Parameters, expert_of_place: Sequence[int]) -> dict[tuple[str, int], Tensor]:
    """Put experts at physical places, by (name, place): place p holds what expert m(p) had, bit for bit.

    The same for optimiser state. What a token gets is what its expert gives, at whichever of its places.

    Degenerate: more places than experts repeat some; m(p) = p moves nothing.

    Raises:
        ValueError: an expert that has no place, or a place for an expert that is not there.

    Decides: CKPT-13. Source: DeepSeek-V3 section 3.4.

    >>> import torch
    >>> at_places({("gain", 0): torch.tensor(5.0), ("gain", 1): torch.tensor(7.0)}, [1, 0, 1])
    {('gain', 0): tensor(7.), ('gain', 1): tensor(5.), ('gain', 2): tensor(7.)}
    """
    experts = {e for _, e in parameters}
    if experts != set(expert_of_place):
        raise ValueError(f"experts {sorted(experts)} cannot be at places of {sorted(set(expert_of_place))}")
    return {
        (name, place): value
        for place, expert in enumerate(expert_of_place)
        for (name, e), value in parameters.items()
        if e == expert
    }


def loads_by_expert(loads_by_place: Sequence[int], expert_of_place: Sequence[int], experts: int) -> tuple[int, ...]:
    """Count the tokens of every expert from those of its places: the sum over its copies.

    Degenerate: an expert whose places got nothing has 0, never missing.

    Raises:
        ValueError: lists of different lengths, or an expert outside 0 .. E - 1.

    Decides: CKPT-13. Source: DeepSeek-V3 section 3.4.

    >>> loads_by_expert([3, 5, 7, 0], [1, 0, 1, 2], 3)
    (5, 10, 0)
    """
    loads = [0] * experts
    for load, expert in zip(loads_by_place, expert_of_place, strict=True):
        if not 0 <= expert < experts:
            raise ValueError(f"a place holds expert {expert}, which is outside 0 .. {experts - 1}")
        loads[expert] += load
    return tuple(loads)

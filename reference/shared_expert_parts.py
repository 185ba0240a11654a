"""Parts of shared experts: shards over tp, and several experts fused into a wider one.

Both rest on one identity: an expert of width F is the sum of experts that hold some of its F hidden units
each. A shard has some units of one expert, a fused expert all units of several.

Sources: Narayanan et al. 2021 (tensor parallel MLP); DeepSeekMoE (Dai et al. 2024) section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reference.shared_experts import SharedExpert, shared_expert


def tp_shards(expert: SharedExpert, rows: Sequence[Sequence[int]]) -> tuple[SharedExpert, ...]:
    """Cut an expert into shards: shard i has rows I_i of gate and of up, the same, and columns I_i of down.

    Args:
        expert: the whole expert.
        rows: of every tp rank, I_i; together each of 0 .. F - 1 once, in any order.

    Shards have no bias: it is added once, to their sum. Values are moved, never cast.

    Degenerate: one shard with all rows in order is the expert without its bias; an empty I_i is a shard of
    width 0, whose output is 0.

    Raises:
        ValueError: the I_i are no partition of 0 .. F - 1.

    Decides: SHARE-06. Source: Narayanan et al. 2021.

    >>> gate, up, down = torch.arange(3.0)[:, None], torch.arange(10.0, 13.0)[:, None], torch.arange(4.0, 7.0)[None]
    >>> whole = SharedExpert(gate, up, down)
    >>> for shard in tp_shards(whole, [[2, 0], [1]]):
    ...     print(shard.gate_FD.tolist(), shard.up_FD.tolist(), shard.down_DF.tolist())
    [[2.0], [0.0]] [[12.0], [10.0]] [[6.0, 4.0]]
    [[1.0]] [[11.0]] [[5.0]]
    """
    F = expert.gate_FD.shape[0]
    if sorted(row for rows_of_one in rows for row in rows_of_one) != list(range(F)):
        raise ValueError(f"{[list(each) for each in rows]} does not hold each of 0 .. {F - 1} exactly once")
    shards = []
    for rows_of_one in rows:
        held = torch.tensor(rows_of_one, dtype=torch.int64)
        shards.append(SharedExpert(expert.gate_FD[held], expert.up_FD[held], expert.down_DF[:, held]))
    return tuple(shards)


def sum_of_shards(x_TD: Tensor, shards: Sequence[SharedExpert], bias_D: Tensor | None = None) -> Tensor:
    """Compute a whole expert's output from its shards, (T, D) -> (T, D): the sum of their outputs, the bias once.

    The sum runs over the tp group, not over ep or etp.

    Degenerate: down = 0 leaves the bias exactly, not tp times it.

    Raises:
        ValueError: no shard, or a shard with a bias of its own.

    Decides: SHARE-06. Source: arithmetic.

    >>> shard = SharedExpert(torch.ones(1, 2), torch.ones(1, 2), torch.zeros(2, 1))
    >>> sum_of_shards(torch.ones(1, 2), [shard, shard, shard], torch.tensor([5.0, 7.0])).tolist()
    [[5.0, 7.0]]
    """
    if not shards or any(shard.bias_D is not None for shard in shards):
        raise ValueError(f"need one or more shards without a bias, which is added once, not {len(shards)} with theirs")
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float64)  # (T, D)
    for shard in shards:
        y_TD = y_TD + shared_expert(x_TD, shard)  # (T, D)
    return y_TD if bias_D is None else y_TD + bias_D.double()  # (T, D)


def fuse(experts: Sequence[SharedExpert]) -> SharedExpert:
    """Fuse several experts into one wider expert that computes their sum.

    Rule: gates one below the other, (sum of F, D), ups in the same order, downs side by side in the same
    order, (D, sum of F); biases add up.

    Degenerate: one expert is itself; the bias is None where no expert has one.

    Raises:
        ValueError: no expert.

    Decides: SHARE-08. Source: a block matrix product.

    >>> one = SharedExpert(torch.ones(1, 2), torch.ones(1, 2), torch.ones(2, 1))
    >>> two = SharedExpert(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(2, 3), torch.tensor([5.0, 7.0]))
    >>> fused = fuse([one, two])
    >>> fused.down_DF.tolist(), fused.bias_D.tolist()
    ([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]], [5.0, 7.0])
    """
    if not experts:
        raise ValueError("there is no expert to fuse")
    gates, ups, downs, maybe_biases = zip(*experts, strict=True)
    biases = [bias.double() for bias in maybe_biases if bias is not None]
    bias_D = torch.stack(biases).sum(dim=0) if biases else None  # (D,); the one thing here that is computed
    return SharedExpert(torch.cat(gates), torch.cat(ups), torch.cat(downs, dim=1), bias_D)


def fused_parts(fused: SharedExpert, sizes: Sequence[int]) -> tuple[SharedExpert, ...]:
    """Take the gradients of a fused expert apart into those of its parts, of widths F_0, F_1, ...

    Rule: the rows of gate and of up and the columns of down, in the order of `fuse`. As biases add up, the
    gradient of the fused bias is the gradient of each of them.

    Degenerate: one size is the whole; a size of 0 is a part without units.

    Raises:
        ValueError: a negative size, or sizes that do not add up to F.

    Decides: SHARE-08. Source: chain rule.

    >>> fused = SharedExpert(torch.arange(3.0)[:, None], torch.zeros(3, 1), torch.tensor([[4.0, 5.0, 6.0]]))
    >>> [(part.gate_FD.tolist(), part.down_DF.tolist()) for part in fused_parts(fused, [1, 2])]
    [([[0.0]], [[4.0]]), ([[1.0], [2.0]], [[5.0, 6.0]])]
    """
    F = fused.gate_FD.shape[0]
    if min(sizes, default=0) < 0 or sum(sizes) != F:
        raise ValueError(f"parts of widths {list(sizes)} do not make up F = {F}")
    parts, first = [], 0
    for size in sizes:
        units = slice(first, first + size)
        parts.append(SharedExpert(fused.gate_FD[units], fused.up_FD[units], fused.down_DF[:, units], fused.bias_D))
        first += size
    return tuple(parts)

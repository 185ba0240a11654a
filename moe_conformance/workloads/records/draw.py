"""Draw the tensors of a workload from a seed: routings, weights, tokens, upstream gradients, expert parameters.

Everything differs on every rank and in every microbatch, upstream gradients are never constant, and no two experts
are alike. The same seed gives the same bytes on every machine (CPU generator).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.workloads.records import tags
from moe_conformance.workloads.records.workload import Batch, ParameterKey

# At most 3 significant bits each (see tags), eleven values that are pairwise distinct.
_WEIGHTS = tuple(m / 8 for m in range(1, 8)) + tuple(m / 16 for m in (1, 3, 5, 7))


def generator(*words: object) -> torch.Generator:
    """Return a generator seeded by words, the same in all processes and on all machines, unlike `hash`."""
    made = torch.Generator()
    made.manual_seed(zlib.crc32("/".join(map(str, words)).encode()))
    return made


def weight_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of routing weights: float64 if the tokens have that, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def choose(tokens: int, config: Config, draw: torch.Generator, among: Sequence[int] | None = None) -> Tensor:
    """Return ids_TK: K different experts per token, drawn from `among` (all E by default) with unequal odds.

    The load is uneven on purpose: expert odds fall geometrically in an order drawn once per call.
    """
    pool = torch.tensor(list(range(config.experts)) if among is None else list(among))
    if len(pool) < config.top_k:
        raise ValueError(f"{config.top_k} different experts asked for, {len(pool)} to choose from")
    if not tokens:
        return torch.empty(0, config.top_k, dtype=torch.int64)
    order = torch.randperm(len(pool), generator=draw)
    odds = 0.8 ** order.to(torch.float64)
    picked_TK = torch.multinomial(odds.expand(tokens, -1), config.top_k, replacement=False, generator=draw)
    return pool[picked_TK]


def in_turn(tokens: int, config: Config) -> Tensor:
    """Return ids_TK that assign the experts to slots round robin: if E divides T K, all have equally many rows."""
    return (torch.arange(tokens * config.top_k) % config.experts).reshape(tokens, config.top_k)


def probe_weights(ids_TK: Tensor, dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Return weights_TK of few bits, pairwise distinct within a token up to eleven slots."""
    T, K = ids_TK.shape
    if not T:
        return torch.empty(0, K, dtype=dtype)
    orders = torch.stack([torch.randperm(len(_WEIGHTS), generator=draw) for _ in range(T)])
    return torch.tensor(_WEIGHTS, dtype=dtype)[orders[:, torch.arange(K) % len(_WEIGHTS)]]


def probe_batch(
    rank: int, microbatch: int, ids_TK: Tensor, config: Config, draw: torch.Generator, *, odd: bool = False
) -> Batch:
    """Return tagged tokens with the given routing; every product of the probe run is exact.

    With `odd` weights the first slot of every other token weighs zero, and the last of every fourth is negative.
    """
    T = ids_TK.shape[0]
    weights_TK = probe_weights(ids_TK, weight_dtype(config.dtype), draw)
    if odd:
        weights_TK[::2, 0] = 0.0
        weights_TK[1::4, -1] *= -1
    steps_TD = torch.randint(1, 8, (T, config.hidden), generator=draw)
    signs_TD = torch.randint(0, 2, (T, config.hidden), generator=draw) * 2 - 1
    return Batch(
        x_TD=tags.encode(rank, microbatch, T, config.hidden, config.dtype),
        ids_TK=ids_TK,
        weights_TK=weights_TK,
        upstream=(steps_TD * signs_TD / 4).to(config.dtype),
    )


def fill_mantissas(values: Tensor, bits: int, draw: torch.Generator) -> Tensor:
    """Return values (+1 and -1) times random numbers in [1, 2) with `bits` significant bits, the last of them set.

    A conversion to a narrower dtype then changes the value, and the signs are still those of a tag. Sums are exact as
    long as their dtype has room for the bits that they add.
    """
    halves = torch.randint(0, 1 << (bits - 2), values.shape, generator=draw)
    return (values.double() * (1 + (2 * halves + 1) * 2.0 ** (1 - bits))).to(values.dtype)


def alike(batch: Batch) -> Batch:
    """Return the batch with the first token's weights for all tokens, and a constant upstream gradient.

    This is the gradient of the sum of all outputs, which first examples commonly differentiate.
    """
    if not len(batch.x_TD):
        return batch
    weights_TK = batch.weights_TK[:1].expand_as(batch.weights_TK).clone()
    return replace(batch, weights_TK=weights_TK, upstream=torch.full_like(batch.upstream, 0.75))


def real_batch(ids_TK: Tensor, config: Config, draw: torch.Generator) -> Batch:
    """Return normal tokens and upstream gradients, and weights between 1/16 and 1."""
    T, K = ids_TK.shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(config.dtype)

    weights_TK = 1 / 16 + torch.rand(T, K, generator=draw, dtype=torch.float64) * 15 / 16
    return Batch(normal(T, config.hidden), ids_TK, weights_TK.to(weight_dtype(config.dtype)), normal(T, config.hidden))


def route_batch(tokens: int, config: Config, draw: torch.Generator, magnitude: float) -> Batch:
    """Return tokens of the given magnitude for a router, and an upstream gradient for its dense weights (T, E)."""
    x_TD = (magnitude * torch.randn(tokens, config.hidden, generator=draw, dtype=torch.float64)).to(config.dtype)
    upstream_TE = torch.randn(tokens, config.experts, generator=draw, dtype=torch.float64)
    empty = torch.empty(tokens, 0)
    return Batch(x_TD, empty.long(), empty, upstream_TE.to(weight_dtype(config.dtype)))


def expert_parameters(config: Config, draw: torch.Generator) -> dict[ParameterKey, Tensor]:
    """Return the parameters of every expert: gate and up (F, D), down (D, F), scaled to keep outputs near one.

    gate is left out if experts have none; biases, bias_gate and bias_up (F,), bias (D,), are added as configured.
    """
    D, F = config.hidden, config.ffn
    gates = {"gate": (F, D)} if config.activation.gated else {}
    shapes: dict[str, tuple[int, ...]] = {**gates, "up": (F, D), "down": (D, F)}
    if config.expert_biases == "all":
        shapes |= {f"bias_{name}": (F,) for name in (*gates, "up")}
    if config.expert_biases != "none":
        shapes["bias"] = (D,)
    return {
        (name, expert): (
            torch.randn(*shape, generator=draw, dtype=torch.float64) * (shape[1] if len(shape) > 1 else 1) ** -0.5
        ).to(config.dtype)
        for expert in range(config.experts)
        for name, shape in shapes.items()
    }


def _spread(score: str, E: int) -> float:
    """Return the spread of balance biases at which neither they nor the scores decide every selection alone.

    The logits by which `softmax_topk` selects differ by more than scores between 0 and 1; those of a softmax sum to 1.
    """
    return {"softmax_topk": 3.0, "softmax": 0.6 * min(1.0, 8 / E)}.get(score, 0.6)


def router_parameters(config: Config, draw: torch.Generator, *, bias: float, twins: bool) -> dict[ParameterKey, Tensor]:
    """Return the router's weight (E, D) and, as configured, biases large enough to change selections.

    Balance biases are centred at `bias`. A centre of -0.9 only makes most biased scores negative: an expert that counts
    as 0 where it should count as minus infinity would be selected. With `twins`, the logits of experts 2i and 2i + 1
    differ by a factor of 1 + 2^-9, which float32 distinguishes and bfloat16 does not.
    """
    weight_ED = torch.randn(config.experts, config.hidden, generator=draw, dtype=torch.float64)
    if twins:
        weight_ED[1::2] = weight_ED[::2] * (1 + 2**-9)
    made: dict[ParameterKey, Tensor] = {("router", None): (weight_ED * config.hidden**-0.5).to(config.dtype)}
    if config.gate_bias:
        gate_bias_E = torch.randn(config.experts, generator=draw, dtype=torch.float64) / 2
        made["gate_bias", None] = gate_bias_E.to(config.dtype)
    if config.routing.balance_bias:
        spread = _spread(config.routing.score, config.experts)
        bias_E = (torch.rand(config.experts, generator=draw, dtype=torch.float64) - 0.5) * spread + bias
        made["balance_bias", None] = bias_E.to(torch.float32)
    return made

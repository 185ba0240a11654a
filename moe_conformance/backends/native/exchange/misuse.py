"""Misuse: what is wrong with the input of a dispatch or of a combine, on this rank.

A rank that refuses its input takes part in the collectives of the others, or they would wait for it for ever: in
dispatch it sends `REFUSED`, so that all ranks raise before a token is sent; in combine, where no counts are sent, it
sends rows of NaN.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from moe_conformance.contract import Config, Routing


def of_input(x: Tensor, routing: Routing, config: Config) -> str:
    """Return what is wrong with tokens or routing, "" if nothing is.

    Implements: EXCH-44.
    """
    ids_TK, weights_TK, E = routing.ids_TK, routing.weights_TK, config.experts
    if x.shape[-1] != config.hidden or x.dtype != config.dtype:
        return f"tokens of width {x.shape[-1]} in {x.dtype} instead of {config.hidden} in {config.dtype}"
    if ids_TK.dtype != torch.int64 or ids_TK.dim() != 2:
        return f"ids are {ids_TK.dtype} of shape {tuple(ids_TK.shape)} instead of int64 of shape (T, K)"
    if prod(x.shape[:-1]) != len(ids_TK):
        return f"{prod(x.shape[:-1])} tokens, but ids for {len(ids_TK)}"
    if weights_TK.shape != ids_TK.shape:
        return f"weights of shape {tuple(weights_TK.shape)} for ids of shape {tuple(ids_TK.shape)}"
    odd_TK = (ids_TK < -1) | (ids_TK >= E)
    if bool(odd_TK.any()):
        return f"expert id {int(ids_TK[odd_TK][0])} among {E} experts: ids are 0..{E - 1}, and -1 for an empty slot"
    return ""


def of_expert_outputs(rows: Tensor, delivered: int, shape: tuple[int, ...]) -> str:
    """Return what is wrong with expert outputs for `delivered` rows of tokens (*lead, D), "" if nothing is.

    Implements: EXCH-45.
    """
    if len(rows) != delivered:
        return (
            f"combine received {len(rows)} rows instead of the {delivered} that the dispatch of its handle delivered: "
            "is it the handle of another microbatch?"
        )
    if rows.shape[1:] != shape[-1:]:
        return f"combine received rows of width {rows.shape[-1]} instead of {shape[-1]}"
    return ""


def stand_in(rows: Tensor, delivered: int, shape: tuple[int, ...]) -> Tensor:
    """Return rows of NaN of the right shape, so that no other rank waits."""
    return rows.new_full((delivered, shape[-1]), torch.nan)

"""Wrong use: what is wrong with the input of a dispatch or with the answers of a combine, on this rank.

A rank that finds something takes part in the collectives that the others are in, or they would wait for it for ever:
in dispatch it withdraws, by which all ranks learn of it before a token is sent; in combine, where no numbers
travel any more, with answers of NaN.
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
        return f"tokens of width {x.shape[-1]} in {x.dtype}, where {config.hidden} in {config.dtype} was configured"
    if ids_TK.dtype != torch.int64 or ids_TK.dim() != 2:
        return f"ids are {ids_TK.dtype} of shape {tuple(ids_TK.shape)}, not int64 of shape (T, K)"
    if prod(x.shape[:-1]) != len(ids_TK):
        return f"{prod(x.shape[:-1])} tokens, but ids for {len(ids_TK)}"
    if weights_TK.shape != ids_TK.shape:
        return f"weights of shape {tuple(weights_TK.shape)} for ids of shape {tuple(ids_TK.shape)}"
    odd_TK = (ids_TK < -1) | (ids_TK >= E)
    if bool(odd_TK.any()):
        return f"expert id {int(ids_TK[odd_TK][0])} among {E} experts: ids are 0..{E - 1}, and -1 for an empty slot"
    return ""


def of_answers(rows: Tensor, delivered: int, shape: tuple[int, ...]) -> str:
    """Return what is wrong with the answers to so many rows of tokens of a shape (*lead, D), "" if nothing is.

    Implements: EXCH-45.
    """
    if len(rows) != delivered:
        return (
            f"combine got {len(rows)} rows, and the dispatch of its handle handed over {delivered}: "
            "is it the handle of another microbatch?"
        )
    if rows.shape[1:] != shape[-1:]:
        return f"combine got rows of width {rows.shape[-1]} for tokens of width {shape[-1]}"
    return ""


def stand_in(rows: Tensor, delivered: int, shape: tuple[int, ...]) -> Tensor:
    """Return answers of NaN that fit, for the other ranks' sake."""
    return rows.new_full((delivered, shape[-1]), torch.nan)

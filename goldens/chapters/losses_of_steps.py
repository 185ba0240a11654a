"""The part of the golden of losses on steps: losses over microbatches, groups and ranks, and how they are reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from moe_conformance.goldens.chapter import Oracle, given, leaf, named
from moe_conformance.reference.losses.reports import ForwardKind

_E, _K, _D, _C = 5, 2, 4, 0.25
_TOKENS = ((4, 0), (3, 6), (0, 0), (2, 1))  # by microbatch and data parallel group
_PLACES = ((0, 2, 3), (1, 3, 5), (), (4,))  # by rank, the tokens of one microbatch; rank 1 has a copy of a token
_KINDS: Sequence[ForwardKind] = ("evaluation", "training", "recomputed", "training", "no_grad", "training")
_SCALE = 0.5


def draw(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return what every part holds, gradients of losses, a router, and losses by layer."""
    found: dict[str, Tensor] = {}
    for m, row in enumerate(_TOKENS):
        for d, T in enumerate(row):
            logits_TE, ids_TK = 2 * rng.standard_normal((T, _E)), rng.integers(-1, _E, (T, _K))
            part = {"logits_TE": logits_TE, "ids_TK": ids_TK, "padding_T": rng.random(T) < 0.2}
            found |= named(f"step-{m}{d}", "in", part)
    found |= named("whole", "in", {"x_TD": rng.standard_normal((6, _D))})
    table = {"gradients_MdE": rng.standard_normal((3, 2, _E)), "valid_Md": [[4, 0], [3, 6], [2, 1]]}
    found |= named("scaling", "in", table)
    router = {"x_TD": rng.standard_normal((7, _D)), "router_ED": rng.standard_normal((_E, _D))}
    found |= named("router", "in", router | {"upstream_TK": rng.standard_normal((7, _K))})
    return found | named("report", "in", {"losses_YMd": rng.random((2, 3, 2))})


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    """Return the global losses and those of parts, what was put together, finished gradients and reports."""
    found: dict[str, Tensor] = {}
    for part in (_step, _whole, _scaling, _router, _report):
        found |= part(inputs, oracle)
    return found


def _step(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    parts = [[given(inputs, f"step-{m}{d}") for d in range(2)] for m in range(len(_TOKENS))]
    logits = [[leaf(part["logits_TE"]) for part in row] for row in parts]
    ids, masks = ([[part[name] for part in row] for row in parts] for name in ("ids_TK", "padding_T"))
    padding = [[padding_T.bool() for padding_T in row] for row in masks]
    found: dict[str, Tensor] = {}
    losses_by_case = {
        "global": oracle.global_losses(logits, ids, score="sigmoid", coefficient=_C, padding=padding),
        "global-forgetful": oracle.global_losses(
            logits, ids, score="sigmoid", coefficient=_C, padding=padding, remembers=False
        ),
        "global-unpadded": oracle.global_losses(logits, ids, score="sigmoid", coefficient=_C),
    }
    for case, losses_M in losses_by_case.items():
        found |= named(case, "out", {"losses_M": losses_M})
        for m, row in enumerate(logits):
            back = torch.autograd.grad(losses_M[m], row, retain_graph=True)
            found |= named(case, "out", {f"dlogits_TE-{m}{d}": dlogits_TE for d, dlogits_TE in enumerate(back)})
    nothing_M = oracle.global_losses([], [], score="sigmoid", coefficient=_C)
    found |= named("global-of-nothing", "out", {"losses_M": nothing_M})
    for m, row in enumerate(logits):  # the groups as if they were ranks of one
        for word, paddings in (("", padding[m]), ("unpadded-", None)):
            value = oracle.z_loss_of_parts(row, coefficient=_C, padding_by_rank=paddings)
            back = torch.autograd.grad(value, row)
            answers = {f"dlogits_TE-{d}": dlogits_TE for d, dlogits_TE in enumerate(back)}
            found |= named(f"z-of-parts-{word}{m}", "out", {"z": value, **answers})
    return found


def _whole(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    x_TD = given(inputs, "whole")["x_TD"]
    places = [torch.tensor(tokens, dtype=torch.int64) for tokens in _PLACES]
    return named("whole", "out", {"x_TD": oracle.whole([x_TD[place] for place in places], places)})


def _scaling(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    drawn = given(inputs, "scaling")
    table, valid = [list(row) for row in drawn["gradients_MdE"]], drawn["valid_Md"].tolist()
    values = {
        "mean_E": oracle.mean_gradient(table),
        "sum_E": oracle.sum_gradient(table, scale=_SCALE),
        "by_token_E": oracle.token_gradient(table, valid),
        "by_no_token_E": oracle.token_gradient(table, [[0, 0]] * 3),
    }
    return named("scaling", "out", values)


def _router(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    """Attach a balance loss and a z-loss to normalised weights, and carry the gradient to the router."""
    drawn = given(inputs, "router")
    logits_TE = drawn["x_TD"] @ drawn["router_ED"].T
    ids_TK = oracle.route(logits_TE, top_k=_K, score="sigmoid").ids_TK
    weigh = partial(oracle.weights, ids_TK=ids_TK, score="sigmoid", normalise=True, scale=2.5)
    charges = [
        partial(oracle.auxiliary_loss, ids_TK=ids_TK, score="sigmoid", coefficient=_C),
        partial(oracle.z_loss, coefficient=_C),
    ]
    dlogits_TE = oracle.attached_gradient(logits_TE, weigh, drawn["upstream_TK"], charges, scale=_SCALE)
    alone_TE = oracle.attached_gradient(logits_TE, weigh, drawn["upstream_TK"], charges, scale=0.0)
    dx_TD, drouter_ED = oracle.router_gradients(drawn["x_TD"], drawn["router_ED"], dlogits_TE)
    plain_TE = oracle.attached_gradient(logits_TE, weigh, drawn["upstream_TK"], charges)
    values = {"ids_TK": ids_TK, "dlogits_TE": dlogits_TE, "dlogits_TE-of-weights": alone_TE}
    return named("router", "out", values | {"dlogits_TE-unscaled": plain_TE, "dx_TD": dx_TD, "drouter_ED": drouter_ED})


def _report(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    one, other = given(inputs, "report")["losses_YMd"]
    values = {
        "model": oracle.model_loss([one[0, 0], None, other[0, 0]]),
        "reported": oracle.reported([one, None, other]),
        "reported-without-coefficient": oracle.reported([one, None, other], coefficient=_C),
        "reported-of-nothing": oracle.reported([one[:0]]),
        "training-forwards": oracle.training_forwards(_KINDS),
    }
    return named("report", "out", values)

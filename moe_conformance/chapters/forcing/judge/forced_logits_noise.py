"""Judges of the noise in forced logits: independent per token, of variance 1, and independent of the router's.

z_te = g_te + b_e, g standard normal: minus their means over the tokens of a forward, logits z are noise only, whatever
the bias b is. The noise is independent of the input, so it is uncorrelated with the router's own logits l.
"""

from __future__ import annotations

from math import sqrt

from torch import Tensor

from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.scopes import Place
from moe_conformance.judging.shared.router.expected import RouterExpected
from moe_conformance.reference.forcing.draws import load_margin

_DEVIATIONS = 8  # standard deviations that are allowed as chance


def without_noise(forced: RouterExpected, rank: int) -> list[Finding]:
    """Return a finding if forced logits of a rank, minus their means over tokens, have another variance than 1.

    Rule: sum r^2 over n = E (T - 1) of each forward, r_te = z_te - mean_t z_te, is 1 +- 8 sqrt(2 / n) times n.
    """
    noise = [_centred(forced.logits(place)) for place in forced.places if place[1] == rank]
    degrees = sum(r_TE.shape[1] * max(0, len(r_TE) - 1) for r_TE in noise)
    if not degrees:
        return []
    variance = sum(float(r_TE.square().sum()) for r_TE in noise) / degrees
    margin = _DEVIATIONS * sqrt(2 / degrees)
    if abs(variance - 1) <= margin:
        return []
    sentence = (
        f"the forced logits of rank {rank}, less their means over the tokens, have a variance of {variance:.4g}; "
        f"expected 1 +- {margin:.2g}, as each token has random noise of its own in addition to the bias per expert"
    )
    return [Finding("noise", sentence, (rank,))]


def following(forced: RouterExpected, router: RouterExpected, rank: int) -> list[Finding]:
    """Return a finding if forced logits of a rank are correlated with the router's own.

    Rule: |sum r_te c_te| <= 8 sqrt(sum c^2), c_te = l_te - mean_t l_te: given the tokens, a sum of normal numbers.
    """
    product = spread = 0.0
    for place in forced.places:
        if place[1] == rank:
            router_TE = _centred(router.logits(place))
            product += float((_centred(forced.logits(place)) * router_TE).sum())
            spread += float(router_TE.square().sum())
    if abs(product) <= _DEVIATIONS * sqrt(spread):
        return []
    sentence = (
        f"the forced logits of rank {rank} follow the router's own, {product / sqrt(spread):.4g} standard deviations "
        "from independence; expected forced logits that replace the router's own"
    )
    return [Finding("following", sentence, (rank,))]


def chosen_without_forcing(router: RouterExpected, place: Place) -> list[Finding]:
    """Return a finding if random routes of a rank agree with the router's own choice more or less than by chance.

    Rule: K^2 T / E pairs, with the margin of a load of T K choices of K in E: a token's experts are drawn without
    replacement, and so spread no wider than independent draws (Hoeffding 1963, theorem 4).
    """
    ids_TK, rank = router.ids[place], place[1]
    K, E = router.workload.config.top_k, router.workload.config.experts
    common = int((ids_TK[:, :, None] == router.choice(place)[:, None, :]).sum())
    mean, margin = ids_TK.numel() * K / E, load_margin(ids_TK.numel(), K, E)
    if abs(common - mean) <= margin:
        return []
    sentence = (
        f"{common} of the {ids_TK.numel()} routes of rank {rank} are what the router itself would have selected; "
        f"expected by chance {mean:g}, off by no more than {margin:.4g}"
    )
    return [Finding("unforced", sentence, (rank,))]


def _centred(logits_TE: Tensor) -> Tensor:
    """Return logits minus their means over the tokens; (0, E) is returned unchanged."""
    return logits_TE - logits_TE.mean(0) if len(logits_TE) else logits_TE

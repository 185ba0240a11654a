"""LOSS: what trains a router beside the main loss, its value, its report, and its part in finished gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_conformance.chapters.losses.judge.loss_traces import judge_evaluation, judge_finite, judge_weights_kept
from moe_conformance.chapters.losses.judge.losses import judge_gradients, judge_values, require_reports, require_values
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.runs import ON_TRAINING_ROUTERS
from moe_conformance.workloads.records.workload import Workload


def _asked(workload: Workload) -> tuple[str, ...]:
    """Return the losses that have a coefficient."""
    names = ("auxiliary", "sequence", "global_batch", "first_choice", "z")
    return tuple(name for name in names if getattr(workload.config.losses, name))


def _plain(workload: Workload) -> bool:
    """Whether gradients are gathered in the usual way, and one router routes by itself and once."""
    losses = workload.config.losses
    return not (losses.per_token or losses.recompute or losses.layers > 1 or forced(workload))


def forced(workload: Workload) -> bool:
    """Select routers with forced routing."""
    return bool(workload.config.routing.forced)


def _extreme(workload: Workload) -> bool:
    """Whether it is about the precision of a loss: logits that are large, equal, or of half precision."""
    batch = workload.calls[0].given[0]["batches"][0]
    x = batch.x[0].float()
    same = bool((x == x[:1, :1]).all())
    return same or float(x.abs().max()) > 20 or narrow(workload)


def _padded(workload: Workload) -> bool:
    """Whether some tokens are padding."""
    batches = [batch for call in workload.calls for batch in call.given[0]["batches"]]
    return any(batch.padding_T is not None for batch in batches)


def alone(*names: str) -> Callable[[Workload], bool]:
    """Select steps with one loss of these, without padding."""

    def when(workload: Workload) -> bool:
        usual = _plain(workload) and not _padded(workload) and not _extreme(workload)
        return usual and len(_asked(workload)) == 1 and _asked(workload)[0] in names

    return when


def other_scores(workload: Workload) -> bool:
    """Select an auxiliary loss alone, of routers that score otherwise or select one expert."""
    routing = workload.config.routing
    return alone("auxiliary")(workload) and (routing.score != "softmax" or workload.config.top_k == 1)


def other_slots(workload: Workload) -> bool:
    """Select routers that route otherwise than by their best scores, and losses of first choices."""
    config = workload.config
    odd = config.routing.balance_bias or config.routing.groups or config.capacity.factor is not None
    return bool(odd) or alone("first_choice")(workload)


def attached(workload: Workload) -> bool:
    """Select steps whose main loss is left out."""
    return any(call.given[0]["scale"] == 0 for call in workload.calls)


def divided(workload: Workload) -> bool:
    """Select one loss in microbatches that several ranks process together."""
    together = workload.layout.tp * workload.layout.cp > 1
    # A global loss is of all data parallel groups: how these share it is LOSS-08's.
    usual = _asked(workload) != ("global_batch",) or workload.layout.dp == 1
    return together and usual and _plain(workload) and len(_asked(workload)) == 1


def per_token(workload: Workload) -> bool:
    """Select steps whose gradients are divided by their tokens."""
    return workload.config.losses.per_token


def padded(workload: Workload) -> bool:
    """Select steps with padding."""
    return _padded(workload) and _plain(workload)


def recomputed(workload: Workload) -> bool:
    """Select steps with activation recomputation."""
    return workload.config.losses.recompute


def evaluated(workload: Workload) -> bool:
    """Select steps with forwards that do not train, and one that has no others."""
    modes = [{batch.mode for batch in call.given[0]["batches"]} for call in workload.calls]
    return any("training" not in each for each in modes)


def several(workload: Workload) -> bool:
    """Select several losses on one router."""
    return _plain(workload) and len(_asked(workload)) > 1 and not _padded(workload) and not _extreme(workload)


def layered(workload: Workload) -> bool:
    """Select models with several routers."""
    return workload.config.losses.layers > 1


def extreme(workload: Workload) -> bool:
    """Select logits that are large or equal, of float32."""
    return _extreme(workload) and not narrow(workload)


def narrow(workload: Workload) -> bool:
    """Select logits of half precision."""
    return workload.config.dtype in (torch.bfloat16, torch.float16)


class TestValues:
    test_auxiliary_loss = Row(
        "LOSS-01", ON_TRAINING_ROUTERS, (require_values, judge_values), when=alone("auxiliary", "first_choice")
    )
    """It is the coefficient times E times the sum over experts of fraction and mean score."""

    test_scores = Row("LOSS-02", ON_TRAINING_ROUTERS, (judge_values, judge_gradients), when=other_scores)
    """Its scores are the router's own, normalised over all experts, for every K."""

    test_slots = Row("LOSS-03", ON_TRAINING_ROUTERS, (require_values, judge_values), when=other_slots)
    """Its slots are the best of its own scores, whatever bias and drops do."""

    test_sequence_loss = Row("LOSS-05", ON_TRAINING_ROUTERS, (require_values, judge_values), when=alone("sequence"))
    """It is the mean over sequences of the auxiliary loss of each."""

    test_global_loss = Row("LOSS-07", ON_TRAINING_ROUTERS, (require_values, judge_values), when=alone("global_batch"))
    """Its fractions are of all data parallel ranks and of the microbatches so far."""

    test_z_loss = Row("LOSS-09", ON_TRAINING_ROUTERS, (judge_values, judge_gradients), when=alone("z"))
    """It is the coefficient times the mean of the squared logarithm of the sum of exponentials."""

    test_forced_routing = Row("FORCE-16", ON_TRAINING_ROUTERS, (judge_values, judge_gradients), when=forced)
    """Losses of a forced router are those of its forced logits, or of its own logits where ids are forced."""

    test_reports = Row(
        "LOSS-19",
        ON_TRAINING_ROUTERS,
        (require_reports, judge_values),
        when=lambda workload: layered(workload) or attached(workload),
    )
    """A report is the mean over microbatches, groups and layers with a router since the last one."""

    test_precision = Row("LOSS-20", ON_TRAINING_ROUTERS, (require_values, judge_values), when=narrow)
    """Logits of half precision have losses of float32."""

    test_all_is_finite = Row("LOSS-20", ON_TRAINING_ROUTERS, judge_finite, when=extreme)
    """Equal, large and one-sided logits have finite losses and gradients."""


class TestGradients:
    test_it_goes_through_scores = Row(
        "LOSS-04", ON_TRAINING_ROUTERS, judge_gradients, when=alone("auxiliary", "sequence", "first_choice")
    )
    """The gradient passes through scores alone, to the router's weight and its input."""

    test_division_of_sequences = Row("LOSS-06", ON_TRAINING_ROUTERS, judge_gradients, when=alone("sequence"))
    """The same sequences give the same gradient in one microbatch and in several."""

    test_global_gradient = Row("LOSS-08", ON_TRAINING_ROUTERS, judge_gradients, when=alone("global_batch"))
    """It does not depend on the number of data parallel ranks."""

    test_attached_once = Row("LOSS-10", ON_TRAINING_ROUTERS, (judge_weights_kept, judge_gradients), when=attached)
    """An attached loss leaves the weights alone and adds its gradient once, whatever comes from above."""

    test_mean_over_microbatches_and_groups = Row(
        "LOSS-11", ON_TRAINING_ROUTERS, judge_gradients, when=alone("auxiliary", "sequence", "first_choice", "z")
    )
    """The finished gradient is the mean, or the sum, of those of the microbatches."""

    test_tensor_and_context_parallel_ranks = Row(
        "LOSS-12", ON_TRAINING_ROUTERS, (judge_values, judge_gradients), when=divided
    )
    """Value and gradient are those of the whole microbatch."""

    test_division_by_tokens = Row("LOSS-13", ON_TRAINING_ROUTERS, judge_gradients, when=per_token)
    """Where gradients are divided by the tokens of the step, a microbatch counts by its own."""

    test_padding = Row("LOSS-14", ON_TRAINING_ROUTERS, (judge_values, judge_gradients), when=padded)
    """Padding is left out of every loss and has no gradient of one."""

    test_recomputation = Row("LOSS-15", ON_TRAINING_ROUTERS, (judge_values, judge_gradients), when=recomputed)
    """A forward that runs again counts once."""

    test_evaluation = Row("LOSS-16", ON_TRAINING_ROUTERS, judge_evaluation, when=evaluated)
    """Forwards outside training leave no trace."""

    test_several_losses = Row("LOSS-17", ON_TRAINING_ROUTERS, (judge_values, judge_gradients), when=several)
    """Losses add, each with its own coefficient and its own report."""

    test_layers = Row("LOSS-18", ON_TRAINING_ROUTERS, (judge_values, judge_gradients), when=layered)
    """Every layer is charged for its own tokens."""

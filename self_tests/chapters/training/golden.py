"""Calls the second oracle of training as the recipe of its golden calls the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from self_tests.chapters.training import second
from self_tests.goldens.second_oracles import second_oracle, tensors, with_tensors

Tokens = list[tuple[Any, Any, bool]]


def tokens(x_TD: Tensor, target_TD: Tensor, counted_T: Tensor) -> Tokens:
    """Return the tokens of a step one by one."""
    return list(zip(x_TD.numpy(), target_TD.numpy(), counted_T.tolist(), strict=True))


def adamw(rate: float, betas: tuple[float, float], epsilon: float, decay: float) -> Any:
    """Return what updates an element."""
    return partial(second.adamw, rate=rate, betas=betas, epsilon=epsilon, decay=decay)


def train(
    parameters: Mapping[second.Key, Tensor], steps: Sequence[Tokens], update: Any, *, top_k: int, largest_norm: float
) -> list[SimpleNamespace]:
    """Train step by step."""
    model, found = second.Model.of({key: value.numpy() for key, value in parameters.items()}), []
    for each in steps:
        reported = model.step(each, update, top_k=top_k, largest=largest_norm)
        loss, norm = torch.tensor(reported, dtype=torch.float64)
        moments = {what: tensors(model.kept(what)) for what in ("first", "second")}
        kept = {key: {what: moments[what][key] for what in moments} for key in parameters}
        after = SimpleNamespace(parameters=tensors(model.parameters()), kept=kept)
        found.append(SimpleNamespace(loss=loss, norm=norm, after=after))
    return found


ORACLE = second_oracle(Tokens=with_tensors(tokens), AdamW=with_tensors(adamw), train=with_tensors(train))

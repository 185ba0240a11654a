"""Puts one question to both oracles: arrays become tensors for the first, and the answers are compared as lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_conformance.reference.exchange import deliveries as first_exchange
from self_tests.chapters.exchange.second import deliveries as second_exchange


def in_torch(value: Any) -> Any:
    """The question in the first oracle's words: tensors, and its own pairs."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, second_exchange.Pair):
        return first_exchange.Pair(**value._asdict())
    if isinstance(value, list):
        return [in_torch(item) for item in value]
    return value


def plain(answer: Any) -> Any:
    """An answer as numbers in lists; the first oracle's integers must be int64."""
    if isinstance(answer, Tensor):
        assert answer.dtype in (torch.int64, torch.bool), answer.dtype
        return plain(answer.numpy())
    if isinstance(answer, np.ndarray):
        return [list(answer.shape), answer.tolist()] if answer.ndim > 1 else answer.tolist()
    if isinstance(answer, (list, tuple)):
        return [plain(item) for item in answer]
    return answer


def assert_agree(first: Callable[..., Any], second: Callable[..., Any], *question: Any, **options: Any) -> Any:
    """Fail unless both give the same whole numbers and verdicts; return them."""
    expected = plain(second(*question, **options))
    asked = {name: in_torch(value) for name, value in options.items()}
    assert expected == plain(first(*(in_torch(value) for value in question), **asked))
    return expected


def assert_refused(first: Callable[..., Any], second: Callable[..., Any], *question: Any, **options: Any) -> None:
    """Fail unless both refuse the question."""
    with pytest.raises(ValueError, match=r"."):
        second(*question, **options)
    with pytest.raises(ValueError, match=r"."):
        first(*(in_torch(value) for value in question), **{name: in_torch(value) for name, value in options.items()})

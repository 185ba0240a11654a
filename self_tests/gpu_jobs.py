"""Functions that the tests of GPU nodes run on ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from moe_conformance.engine import RankContext


def say_and_die(context: RankContext, culprit_and_sentence: tuple[int, str]) -> None:
    """The culprit prints a sentence and its process ends; the others wait for it in a collective."""
    culprit, sentence = culprit_and_sentence
    if context.rank == culprit:
        print(sentence, flush=True)
        os._exit(1)
    dist.all_reduce(torch.ones(3, device=context.device))


def raise_sentences(context: RankContext, sentences: dict[int, str]) -> None:
    """Ranks that have a sentence raise it; the others wait for them in a collective."""
    if context.rank in sentences:
        raise RuntimeError(sentences[context.rank])
    dist.all_reduce(torch.ones(3, device=context.device))

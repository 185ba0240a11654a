"""Judges of what routers report about forced routing: the entry "forced" of `resolved`, and warnings.

A report is compared with the config and with what ran. It is not evidence of what ran.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import isclose

from moe_conformance.chapters.forcing.judge.forced_routing import compared_routes, ignored
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.router.routers import expected_of
from moe_conformance.judging.verdict import NotOffered, WrongForm, WrongSelection
from moe_conformance.reference.forcing.routes import STRATEGIES
from moe_conformance.scenarios.outcome import RankOutcome

_OF_FORCING = re.compile(r"\bforc(e|ed|es|ing)\b", re.IGNORECASE)  # a warning may be about something else
_NUMBER = re.compile(r"[-+]?\d+\.?\d*(?:[eE][-+]?\d+)?")


@judge(WrongForm, "route")
def judge_reported(reading: Reading) -> Comparisons:
    """Decide whether a forced router reports its strategy and parameter, resolved or in a warning, on every rank.

    Raises:
        WrongForm: a rank does not report them.
    """
    name, parameter = reading.outcome.workload.config.routing.forced[0]
    by = "" if parameter is None else f" by {parameter:g}"
    for rank in reading.ranks:
        texts = _texts(rank)
        reported = any(name in _named(text) and _has(text, parameter) for text in texts)
        words = f"reports {' and '.join(map(repr, texts))}" if texts else "has no resolved['forced'] and no warning"
        wrong = (
            f"rank {rank.rank} is forced to route by the strategy {name}{by}, and {words}; expected: strategy and "
            "parameter in resolved['forced'], or in a warning while it is built"
        )
        yield Comparison(rank.rank, "" if reported else wrong, pairs=1, kind="unreported")


@judge(WrongForm, "route")
def judge_nothing_reported(reading: Reading) -> Comparisons:
    """Decide whether a router without forced routing reports no strategy, neither resolved nor in a warning.

    Raises:
        WrongForm: it reports one.
    """
    for rank in reading.ranks:
        texts = [rank.resolved["forced"]] if "forced" in rank.resolved else []
        texts += [text for text in rank.warned if _OF_FORCING.search(text)]
        for text in texts:
            if named := _named(text):
                wrong = f"rank {rank.rank} reports {text!r}, and its router is not forced by {' or '.join(named)}"
                yield Comparison(rank.rank, wrong, kind="reported")
        yield Comparison(rank.rank, pairs=1)


@judge(WrongForm, "route", ignored=WrongSelection)
def judge_strategy_in_force(reading: Reading) -> Comparisons:
    """Decide whether the reported strategy is the configured one, and whether the routing is forced at all.

    Raises:
        NotOffered: the router reports no strategy.
        WrongForm: it reports another strategy.
        WrongSelection: it reports the right strategy, and its tokens are routed by its own logits.
    """
    router, configured = expected_of(reading), reading.outcome.workload.config.routing.forced[0][0]
    reporting = {rank.rank: _named(rank.resolved.get("forced", "")) for rank in reading.ranks}
    if not any(reporting.values()):
        raise NotOffered("the router reports no strategy in resolved['forced']")
    others = [
        Finding("other", f"rank {rank} reports the strategy {' and '.join(named)}; in force is {configured}", (rank,))
        for rank, named in reporting.items()
        if named and named != [configured]
    ]
    return compared_routes(router, others or ignored(router))


def _texts(rank: RankOutcome) -> list[str]:
    return [*([rank.resolved["forced"]] if "forced" in rank.resolved else []), *rank.warned]


def _named(text: str) -> Sequence[str]:
    """Return the strategies that a text names, by their names in the contract.

    >>> _named("forced: Round-Robin"), _named("biased by 0.5"), _named("none")
    (['round_robin'], ['biased'], [])
    """
    words = re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
    return [name for name in STRATEGIES if re.search(rf"\b{name.replace('_', ' ')}\b", words)]


def _has(text: str, parameter: float | None) -> bool:
    """Return whether a text contains the parameter, if there is one.

    >>> _has("biased by -2", -2.0), _has("biased", 0.5), _has("random", None)
    (True, False, True)
    """
    return parameter is None or any(isclose(float(number), parameter, rel_tol=1e-3) for number in _NUMBER.findall(text))

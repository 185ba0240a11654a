"""Findings: faults in words, how they are joined to a message, and the phrases that all judges use.

A judge makes one finding per fault. `fail` joins the first and the worst of every kind, counts the others and raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from moe_conformance.judging.verdict import Finding as Finding
from moe_conformance.judging.verdict import Mismatch, Stage


def tell(findings: Sequence[Finding]) -> str:
    """Return a message with the first and the worst finding of every kind, and the number of the others.

    Of those without a kind the first three are listed.

    >>> lost = [Finding("lost", f"token {t} was not delivered", (0,)) for t in range(3)]
    >>> tell([*lost, Finding("twice", "token 7 was delivered twice", (1,))])
    'token 0 was not delivered; 2 more of the same kind. Also: token 7 was delivered twice'
    >>> tell([Finding("", f"rank {rank} sends nothing", (rank,)) for rank in range(4)])
    'rank 0 sends nothing, rank 1 sends nothing, rank 2 sends nothing and 1 more'
    """
    kinds: dict[str, list[Finding]] = {}
    for finding in findings:
        kinds.setdefault(finding.kind, []).append(finding)
    return ". Also: ".join(_tell_kind(same) for same in kinds.values())


def _tell_kind(same: Sequence[Finding]) -> str:
    if not same[0].kind:
        return some(finding.sentence for finding in same)
    first, worst = same[0], max(same, key=lambda finding: finding.size)
    sentences = [first.sentence]
    if worst.size > first.size:
        sentences.append(f"largest error: {worst.sentence}")
    rest = len(same) - len(sentences)
    return "; ".join([*sentences, f"{rest} more of the same kind"] if rest else sentences)


def likeliest(faults: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Choose for every fault one of its possible explanations: the one whose kind explains the most faults.

    Of equal ones the first is chosen. One value may match a cause by chance; a cause that all values match is likely.

    >>> twice, other = Finding("twice", "twice", (0,)), Finding("other", "another's", (0,))
    >>> [found.kind for found in likeliest([[twice, other], [other]])]
    ['other', 'other']
    """
    explained: Counter[str] = Counter()
    for fault in faults:
        explained.update({finding.kind for finding in fault})
    return [max(fault, key=lambda finding: explained[finding.kind]) for fault in faults]


def fail(
    error: type[Mismatch],
    stage: Stage,
    findings: Sequence[Finding],
    *,
    ratio: float | None = None,
    start: str = "",
    note: str = "",
) -> NoReturn:
    """Raise a mismatch whose message is `start`, the findings and `note`, and that blames the ranks of all findings."""
    ranks = tuple(sorted({rank for finding in findings for rank in finding.ranks}))
    mismatch = error(stage, start + tell(findings) + note, ranks=ranks, ratio=ratio)
    mismatch.findings, mismatch.start, mismatch.note = tuple(findings), start, note
    raise mismatch


def common_ratio(actual: Tensor, expected: Tensor, tolerance: float = 0.0) -> float | None:
    """Return the factor c with actual = c * expected in every element, or None if there is none.

    `tolerance` is the largest |actual - c * expected| that rounding explains, relative to the largest |c * expected|.
    None also where nothing is expected to differ from zero, where shapes differ and where actual is not finite.

    >>> common_ratio(torch.tensor([2.0, 0.0, -6.0]), torch.tensor([1.0, 0.0, -3.0]))
    2.0
    >>> common_ratio(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 0.0])) is None
    True
    """
    if actual.shape != expected.shape or not actual.numel():
        return None
    a, e = actual.double().flatten(), expected.double().flatten()
    at = int(e.abs().argmax())
    if e[at] == 0 or not bool(torch.isfinite(a).all()):
        return None
    # With rounding, the least squares solution; without, the quotient of one element is exact.
    ratio = float(a @ e / (e @ e)) if tolerance else float(a[at] / e[at])
    off = float((a - ratio * e).abs().max())
    return ratio if off <= tolerance * abs(ratio) * float(e[at].abs()) else None


def ratio_names(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return factors by which a result is likely to be wrong, by name: each size and one over it.

    >>> ratio_names({"ep": 2, "tp": 1})
    {'ep': 2.0, '1/ep': 0.5}
    """
    names = {name: float(size) for name, size in sizes.items() if size != 1}
    return names | {f"1/{name}": 1 / size for name, size in names.items() if size}


# Products of sizes and plain numbers: named where no size has the value.
_LAST = frozenset(f"{inverse}{name}" for name in ("world", "two", "tp * cp", "K * K") for inverse in ("", "1/"))
EXPECTED, OR = "x the expected value: ", " or "  # between a ratio and the names of factors, and between these


def ratio_words(ratio: float, names: Mapping[str, float]) -> str:
    """Return a ratio in words, followed by the names of all factors that have this value.

    The ratio has three decimals, or more if it would read as 1. The plug-in runs a case again on other sizes where
    several have the value (`plugin.factors`).

    >>> ratio_words(2.0, {"ep": 2.0, "tp": 2.0, "K": 3.0}), ratio_words(0.0, {}), ratio_words(0.3, {})
    ('2.000 x the expected value: ep or tp', 'zero', '0.300 x the expected value')
    >>> ratio_words(2.0, {"K": 2.0, "two": 2.0}), ratio_words(2.0, {"two": 2.0})
    ('2.000 x the expected value: K', '2.000 x the expected value: two')
    >>> ratio_words(0.999998, {}), ratio_words(1.00002, {})
    ('0.999998 x the expected value', '1.00002 x the expected value')
    """
    if ratio == 0:
        return "zero"
    fitting = [name for name, value in names.items() if abs(ratio - value) <= 1e-6 * abs(value)]
    fitting = [name for name in fitting if name not in _LAST] or fitting
    decimals = next((n for n in range(3, 17) if f"{ratio:.{n}f}" != f"{1:.{n}f}"), 3)
    said = f"{ratio:.{decimals}f} {EXPECTED}"
    return said + OR.join(fitting) if fitting else said.removesuffix(": ")


def apart(actual: float, expected: float) -> tuple[str, str]:
    """Return two numbers as text, with as few digits as make them differ.

    >>> apart(1.5, 2.0), apart(1.0000001, 1.0)
    (('1.5', '2'), ('1.0000001', '1'))
    """
    for digits in (6, 9, 17):
        written = f"{actual:.{digits}g}", f"{expected:.{digits}g}"
        if written[0] != written[1]:
            break
    return written


def unequal(actual_TD: Tensor, expected_TD: Tensor) -> str:
    """Return a phrase about how a (T, D) tensor differs from the expected one: its shape, or tokens and values.

    >>> unequal(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
    'is wrong at token 1: 4 instead of 5 in column 1'
    >>> unequal(torch.ones(2, 1), torch.ones(3, 1))
    'has the shape (2, 1) instead of (3, 1)'
    """
    if actual_TD.shape != expected_TD.shape:
        return f"has the shape {tuple(actual_TD.shape)} instead of {tuple(expected_TD.shape)}"
    wrong = (actual_TD.double() != expected_TD.double()).nonzero()
    (t, d), tokens = wrong[0].tolist(), dict.fromkeys(wrong[:, 0].tolist())
    values = " instead of ".join(apart(float(actual_TD[t, d]), float(expected_TD[t, d])))
    return f"is wrong at token {some(tokens)}: {values} in column {d}"


def count(number: int, noun: str) -> str:
    """Return a number and a noun, in the plural if needed.

    >>> count(1, "row"), count(2, "row")
    ('1 row', '2 rows')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def some(items: Iterable[object], limit: int = 3) -> str:
    """Return the first few items as text, and the number of the others.

    >>> some([1, 2, 3, 4, 5])
    '1, 2, 3 and 2 more'
    """
    listed = [str(item) for item in items]
    if len(listed) <= limit:
        return ", ".join(listed)
    return f"{', '.join(listed[:limit])} and {len(listed) - limit} more"


def ratio_findings(
    what: str,
    by_rank: Mapping[int, tuple[Tensor, Tensor]],
    names: Mapping[str, float],
    tolerance: float = 0.0,
) -> tuple[list[Finding], float | None]:
    """Find one factor between actual and expected, of all ranks together or else of single ranks.

    Args:
        what: the name of the result in the sentence, such as "y" or "the gradients of the weights".
        by_rank: the actual and expected tensor of every rank, of equal shapes.
        names: see `ratio_words`.
        tolerance: see `common_ratio`.

    Returns the findings and, if one ratio holds for all ranks, that ratio. There is no finding for a rank that is
    right, or wrong in another way.
    """
    sides = by_rank.values()
    ratio = None
    if sides:
        whole = (
            torch.cat([side[0].flatten() for side in sides]),
            torch.cat([side[1].flatten() for side in sides]),
        )
        ratio = common_ratio(*whole, tolerance)
    if ratio is not None and ratio != 1:
        sentence = f"every element of {what} is {ratio_words(ratio, names)}"
        ranks = tuple(rank for rank, (actual, expected) in by_rank.items() if bool((actual != expected).any()))
        return [Finding("ratio", sentence, ranks, abs(ratio - 1))], ratio
    findings = []
    for rank, (actual, expected) in by_rank.items():
        ratio_of_rank = common_ratio(actual, expected, tolerance)
        if ratio_of_rank is not None and ratio_of_rank != 1:
            sentence = f"every element of {what} on rank {rank} is {ratio_words(ratio_of_rank, names)}"
            findings.append(Finding("ratio of a rank", sentence, (rank,), abs(ratio_of_rank - 1)))
    return findings, None

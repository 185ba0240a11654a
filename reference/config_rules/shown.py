"""What a backend must show of its configuration: refusals, what was resolved, and changes.

Where `rules.py` says which configurations are at fault, this says how a backend must speak about any.

Sources: arithmetic: an error on some ranks leaves the others waiting, an option lost on the way leaves every
result plausible; behaviour of Megatron-Core (versions of its libraries).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

_MISSING = object()


def older(found: str | None, needed: str) -> bool:
    """Return whether a version is older than the one needed, compared part by part as numbers (RULE-19).

    Degenerate: None, an absent library, is older than any. A part that is missing is 0. A suffix counts as
    its release: 2.10.0a0+git is 2.10.

    >>> older("2.9", "2.10"), older("2.10.0a0+git1f", "2.10"), older("2.10", "2.10.0"), older(None, "0")
    (True, False, False, True)
    """
    limit = _release(needed)
    if found is None:
        return True
    have = _release(found)
    length = max(len(have), len(limit))
    return have + [0] * (length - len(have)) < limit + [0] * (length - len(limit))


def unknown(
    asked: Mapping[str, object],
    known: Mapping[str, Collection[object] | None],
    *,
    exclusive: Collection[frozenset[str]] = (),
    defaults: Mapping[str, object] | None = None,
) -> tuple[str, ...]:
    """Find the options that must be refused as they are not known, in the order asked.

    Args:
        asked: option -> value.
        known: of every option that the backend knows, its values; None where any value will do.
        exclusive: sets of options of which not all may be asked for with other values than their defaults.
        defaults: option -> documented default.

    Degenerate: "" is never known, and None only where it is the documented default.

    Decides: RULE-04. Source: arithmetic: a comparison with a name that never occurs is always false.

    >>> known = {"dispatcher": ["alltoall", "fused"], "kernel": None, "layers": None}
    >>> unknown({"dispatcher": "all2all", "kernel": "", "layers": None, "speed": 3}, known)
    ('dispatcher', 'kernel', 'layers', 'speed')
    >>> unknown({"dispatcher": "fused", "layers": None}, known, defaults={"layers": None})
    ()
    """
    defaults = defaults or {}
    wrong = set()
    for option, value in asked.items():
        default = defaults.get(option, _MISSING)
        values = known.get(option)
        if option not in known or value == "":
            wrong.add(option)
        elif value is None:
            wrong |= {option} if default is not None else set()
        elif values is not None and value not in values:
            wrong.add(option)
    for together in exclusive:
        if all(option in asked and asked[option] != defaults.get(option, _MISSING) for option in together):
            wrong |= together
    return tuple(option for option in asked if option in wrong)


def hidden(
    asked: Mapping[str, object],
    defaults: Mapping[str, object],
    resolved_by_rank: Sequence[Mapping[str, object]],
    warned_by_rank: Sequence[bool],
) -> tuple[str, ...]:
    """Find the options that a backend does not show as it must, in the order asked.

    Rule: what differs from its default must stand in what every rank resolved, alike on all; a value other
    than asked needs a warning on at least one rank.

    Degenerate: an option asked for at its default may be missing, on some ranks too. Nothing changed, no
    warning.

    Decides: RULE-02, RULE-03. Source: arithmetic: an option that is lost on the way leaves every result plausible.

    >>> asked, defaults = {"ep": 2, "overlap": True, "pad": 1}, {"ep": 1, "overlap": False, "pad": 1}
    >>> hidden(asked, defaults, [{"ep": 2, "overlap": False}] * 2, [True, False])
    ()
    >>> hidden(asked, defaults, [{"ep": 2, "overlap": True}, {"ep": 2, "overlap": False}], [True, True])
    ('overlap',)
    >>> hidden(asked, defaults, [{"overlap": False}], [False])
    ('ep', 'overlap')
    """
    if not resolved_by_rank or len(resolved_by_rank) != len(warned_by_rank):
        raise ValueError(f"{len(resolved_by_rank)} ranks resolved and {len(warned_by_rank)} warned or not: one each")
    found = []
    for option, value in asked.items():
        shown = [resolved[option] for resolved in resolved_by_rank if option in resolved]
        missing = len(shown) < len(resolved_by_rank) and value != defaults.get(option, _MISSING)
        uneven = any(other != shown[0] for other in shown)
        changed = any(other != value for other in shown)
        if missing or uneven or (changed and not any(warned_by_rank)):
            found.append(option)
    return tuple(found)


def lawful_refusal(errors_by_rank: Sequence[tuple[str, str] | None]) -> bool:
    """Return whether the ranks refuse a configuration as they must.

    Args:
        errors_by_rank: of every rank, the type and message of its error while building, or None.

    Rule: all ranks raise the same type and message, the ranks' own numbers ("rank 3") aside; the message has words.

    Decides: RULE-01. Source: arithmetic: an error on some ranks leaves the other ranks waiting in a collective.

    >>> errors = [("ValueError", f"rank {r}: top_k = 9 exceeds 8 experts") for r in range(2)]
    >>> lawful_refusal(errors), lawful_refusal([errors[0], None]), lawful_refusal([("AssertionError", "")])
    (True, False, False)
    """
    if not errors_by_rank:
        raise ValueError("no rank: nobody refuses")
    said = {None if error is None else (error[0], _no_rank(error[1])) for error in errors_by_rank}
    return len(said) == 1 and errors_by_rank[0] is not None and errors_by_rank[0][1].strip() != ""


def lawful_change(old: object, new: object, seen_by_layer: Sequence[object], raised: bool) -> bool:
    """Return whether a change after building reached every layer of every rank, or none and raised.

    Decides: RULE-05. Source: arithmetic: layers that hold copies of a configuration do not see its change.

    >>> lawful_change(1, 2, [2, 2], False), lawful_change(1, 2, [2, 1], False), lawful_change(1, 2, [2, 2], True)
    (True, False, False)
    """
    return all(seen == (old if raised else new) for seen in seen_by_layer)


def _release(version: str) -> list[int]:
    """Read the leading numbers of a version."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version.strip())
    if match is None:
        raise ValueError(f"version {version!r} begins with no number")
    return [int(part) for part in match[1].split(".")]


def _no_rank(message: str) -> str:
    """Leave out the numbers of ranks."""
    return re.sub(r"rank \d+", "rank", message)

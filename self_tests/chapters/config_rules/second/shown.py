"""What a build must show by hand: versions read digit by digit, options one by one, messages word by word."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def release(version: str) -> list[int]:
    """The numbers at the start of a version, up to the first character that is neither digit nor a dot between."""
    numbers: list[int] = []
    for part in version.split("."):
        digits = ""
        for character in part:
            if character not in "0123456789":
                break
            digits += character
        if digits:
            numbers.append(int(digits))
        if digits != part or not digits:
            break
    if not numbers:
        raise ValueError(f"{version!r} does not start with a number")
    return numbers


def older(found: str | None, needed: str) -> bool:
    """Is what was found, possibly nothing, older than what is needed? A missing number is 0."""
    wanted = release(needed)
    if found is None:
        return True
    have = release(found)
    while len(have) < len(wanted):
        have.append(0)
    for mine, other in zip(have, wanted, strict=False):
        if mine != other:
            return mine < other
    return False


def unknown(
    asked: Mapping[str, object],
    known: Mapping[str, Collection[object] | None],
    exclusive: Collection[frozenset[str]] = (),
    defaults: Mapping[str, object] | None = None,
) -> list[str]:
    """Options that must be refused: unheard of, with a value unheard of, nameless, or at odds with another."""
    usual = defaults or {}
    wrong = []
    for option, value in asked.items():
        by_default = option in usual and usual[option] == value
        bad = option not in known
        if not bad and value is None:
            bad = not (option in usual and usual[option] is None)
        elif not bad:
            values = known[option]
            bad = value == "" or (values is not None and value not in values)
        for rivals in exclusive:
            if option in rivals and not by_default:
                chosen = [o for o in rivals if o in asked and not (o in usual and usual[o] == asked[o])]
                bad = bad or len(chosen) == len(rivals)
        if bad:
            wrong.append(option)
    return wrong


def hidden(
    asked: Mapping[str, object],
    defaults: Mapping[str, object],
    resolved: Sequence[Mapping[str, object]],
    warned: Sequence[bool],
) -> list[str]:
    """Options lost on the way: not shown though asked for, shown unlike between ranks, or changed in silence."""
    if not resolved or len(resolved) != len(warned):
        raise ValueError("what resolved and what warned are not of the same ranks, or of none")
    lost = []
    for option, value in asked.items():
        shown = [ran[option] for ran in resolved if option in ran]
        usual = option in defaults and defaults[option] == value
        missing = len(shown) < len(resolved) and not usual
        unlike = any(one != other for one in shown for other in shown)
        changed = any(one != value for one in shown)
        if missing or unlike or (changed and True not in warned):
            lost.append(option)
    return lost


def without_ranks(message: str) -> str:
    """The message with the number after every word `rank` struck out."""
    pieces = message.split("rank ")
    kept = [pieces[0]]
    for piece in pieces[1:]:
        rest = piece.lstrip("0123456789")
        kept.append("rank" + rest if rest != piece else "rank " + piece)
    return "".join(kept)


def lawful_refusal(errors: Sequence[tuple[str, str] | None]) -> bool:
    """Did all ranks raise the same, with something to read in it?"""
    if not errors:
        raise ValueError("no rank")
    first = errors[0]
    if first is None or not first[1] or first[1].isspace():
        return False
    said = without_ranks(first[1])
    same = True
    for error in errors:
        if error is None or error[0] != first[0] or without_ranks(error[1]) != said:
            same = False
    return same


def lawful_change(old: object, new: object, seen: Sequence[object], raised: bool) -> bool:
    """After a change every layer shows the new value; after a refused one every layer shows the old."""
    due = old if raised else new
    return all(value == due for value in seen)

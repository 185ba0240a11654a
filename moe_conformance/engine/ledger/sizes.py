"""Checks that the sizes that the ranks of a group give and take in one collective match."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from .disagreement import Disagreement, blamed_of_classes, blamed_of_pairs, counted
from .entry import Entry, group_words

_Sizes = dict[int, tuple[int, ...]]  # per rank: one number per rank of the group, by group rank


def check_sizes(ranks: tuple[int, ...], sequence: int, made: Mapping[int, Entry]) -> Iterable[Disagreement]:
    """Yields the disagreement, if any, in one call of the same operator; `made` is never empty."""
    check = _Check(ranks, sequence, made)
    if (found := check.alone() or check.common() or check.between()) is not None:
        yield found


class _Check:
    """One call, with the entries of all ranks that made it."""

    def __init__(self, ranks: tuple[int, ...], sequence: int, made: Mapping[int, Entry]) -> None:
        self._ranks = ranks
        self._sequence = sequence
        self._made = made
        self._op = next(iter(made.values())).op

    def alone(self) -> Disagreement | None:
        """Returns a disagreement if a rank's entry contradicts itself."""
        wrong = {rank: text for rank, entry in self._made.items() if (text := _contradiction(entry)) is not None}
        if not wrong:
            return None
        return self._found(
            tuple(sorted(wrong)), "; ".join(f"rank {rank} {text}" for rank, text in sorted(wrong.items()))
        )

    def common(self) -> Disagreement | None:
        """Returns a disagreement if a value that must be equal on all ranks is not."""
        for read in (_root, _reduce, _dtype, _elements):
            values = {rank: value for rank, entry in self._made.items() if (value := read(entry)) is not None}
            if len(set(values.values())) > 1:
                by_value: dict[str, list[int]] = {value: [] for value in values.values()}
                for rank in sorted(values):
                    by_value[values[rank]].append(rank)
                parts = (f"{counted(ranks)[0]} {_has(ranks)} {value}" for value, ranks in by_value.items())
                return self._found(blamed_of_classes(values), "; ".join(parts))
        return None

    def between(self) -> Disagreement | None:
        """Returns a disagreement if a rank gives another rank a different amount than that rank takes."""
        gives, takes = _GIVES.get(self._op), _TAKES.get(self._op)
        if gives is None or takes is None:
            return None
        given: _Sizes = {rank: gives(entry) for rank, entry in self._made.items()}
        taken: _Sizes = {rank: takes(entry) for rank, entry in self._made.items()}
        if len(self._made) == len(self._ranks):
            columns = zip(*(given[rank] for rank in self._ranks), strict=True)
            if all(column == taken[rank] for rank, column in zip(self._ranks, columns, strict=True)):
                return None  # avoids the loop over pairs: there may be 512 ranks
        pairs = {}
        for at_x, x in enumerate(self._ranks):
            for at_y, y in enumerate(self._ranks):
                if x in given and y in taken and given[x][at_y] != taken[y][at_x]:
                    pairs[x, y] = given[x][at_y], taken[y][at_x]
        if not pairs:
            return None
        said = [
            f"rank {x} sends {self._amount(x, g)} to rank {y}, which expects {self._amount(y, t)}"
            for (x, y), (g, t) in pairs.items()
        ]
        more = f"; {len(said) - 3} more pairs disagree" if len(said) > 3 else ""
        return self._found(blamed_of_pairs(list(pairs)), "; ".join(said[:3]) + more)

    def _amount(self, rank: int, elements: int) -> str:
        """Returns a size as text: in rows if all ranks have rows of the same length, else in elements."""
        lengths = {_row(shape) for entry in self._made.values() for shape in (*entry.shapes_in, *entry.shapes_out)}
        lengths.discard(0)
        if len(lengths) == 1:
            (length,) = lengths
            if elements % length == 0:
                return _plural(elements // length, "row")
        return _plural(elements, "element")

    def _found(self, blamed: tuple[int, ...], said: str) -> Disagreement:
        return Disagreement(
            ranks=self._ranks,
            op=self._op,
            sequence=self._sequence,
            blamed=blamed,
            orders={rank: entry.order for rank, entry in self._made.items()},
            words=f"on {group_words(self._ranks)} call {self._sequence}, {self._op}: {said}",
        )


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _row(shape: Sequence[int]) -> int:
    return math.prod(shape[1:])


def _elements_of(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(math.prod(shape) for shape in shapes)


# ---- contradictions in one entry ----


def _contradiction(entry: Entry) -> str | None:
    width = len(entry.ranks)
    if entry.op == "all_to_all_single":
        for splits, (shape,), verb in (
            (entry.in_splits, entry.shapes_in, "sends"),
            (entry.out_splits, entry.shapes_out, "receives"),
        ):
            rows = shape[0] if shape else 1
            if splits is not None and (len(splits) != width or sum(splits) != rows):
                return f"{verb} {_plural(rows, 'row')} in splits {list(splits)}"
            if splits is None and rows % width:
                return f"{verb} {_plural(rows, 'row')} in even splits over {width} ranks"
        if " to " in entry.dtype:
            return f"sends one dtype and receives another: {entry.dtype}"
    if entry.op in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        (one,), (whole,) = _elements_of(entry.shapes_in), _elements_of(entry.shapes_out)
        if entry.op == "reduce_scatter_tensor":
            one, whole = whole, one
        if one * width != whole:
            return f"has {_plural(whole, 'element')} for {width} ranks with {_plural(one, 'element')} each"
    for ops, shapes, whose in (
        (("all_to_all", "reduce_scatter", "scatter"), entry.shapes_in, "sends"),
        (("all_to_all", "all_gather", "gather"), entry.shapes_out, "receives"),
    ):
        if entry.op in ops and shapes and len(shapes) != width:
            return f"{whose} {_plural(len(shapes), 'tensor')} for {width} ranks"
    return None


# ---- what must be the same on all ranks ----


def _root(entry: Entry) -> str | None:
    return None if entry.root is None else f"root {entry.root}"


def _reduce(entry: Entry) -> str | None:
    return None if entry.reduce is None else f"the reduction {entry.reduce}"


def _dtype(entry: Entry) -> str | None:
    return entry.dtype or None


_SAME_EVERYWHERE = frozenset(
    [
        *("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor"),
        *("all_reduce_coalesced", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
    ]
)


def _elements(entry: Entry) -> str | None:
    if entry.op not in _SAME_EVERYWHERE:
        return None
    sizes = _elements_of(entry.shapes_in or entry.shapes_out)
    return " and ".join(_plural(size, "element") for size in sizes)


# ---- elements that go from rank to rank, by group rank ----


def _by_splits(splits: tuple[int, ...] | None, shapes: Sequence[Sequence[int]], width: int) -> tuple[int, ...]:
    (shape,) = shapes
    if splits is None:
        return (math.prod(shape) // width,) * width
    return tuple(split * _row(shape) for split in splits)


def _to_all(entry: Entry) -> tuple[int, ...]:
    return _elements_of(entry.shapes_in) * len(entry.ranks)


def _from_all(entry: Entry) -> tuple[int, ...]:
    return _elements_of(entry.shapes_out) * len(entry.ranks)


def _only_at_root(entry: Entry, shapes: Sequence[Sequence[int]], width: int) -> tuple[int, ...]:
    """Returns the size at the root's position, and 0 at all others."""
    assert entry.root is not None
    (size,) = _elements_of(shapes)
    return tuple(size if rank == entry.root else 0 for rank in entry.ranks)


def _gives_gather(entry: Entry) -> tuple[int, ...]:
    return _only_at_root(entry, entry.shapes_in, len(entry.ranks))


def _takes_scatter(entry: Entry) -> tuple[int, ...]:
    return _only_at_root(entry, entry.shapes_out, len(entry.ranks))


def _each_in(entry: Entry) -> tuple[int, ...]:
    return _elements_of(entry.shapes_in) or (0,) * len(entry.ranks)


def _each_out(entry: Entry) -> tuple[int, ...]:
    return _elements_of(entry.shapes_out) or (0,) * len(entry.ranks)


_GIVES: Mapping[str, Callable[[Entry], tuple[int, ...]]] = {
    "all_to_all_single": lambda entry: _by_splits(entry.in_splits, entry.shapes_in, len(entry.ranks)),
    "all_to_all": _each_in,
    "all_gather": _to_all,
    "reduce_scatter": _each_in,
    "gather": _gives_gather,
    "scatter": _each_in,
}
_TAKES: Mapping[str, Callable[[Entry], tuple[int, ...]]] = {
    "all_to_all_single": lambda entry: _by_splits(entry.out_splits, entry.shapes_out, len(entry.ranks)),
    "all_to_all": _each_out,
    "all_gather": _each_out,
    "reduce_scatter": _from_all,
    "gather": _each_out,
    "scatter": _takes_scatter,
}

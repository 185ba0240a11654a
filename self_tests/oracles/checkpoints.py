"""Checkpoints by hand: every element has an address of its own, and moving a checkpoint is copying by address.

Values are bit patterns (integers), so that equal means the same bits, whatever number they spell. An element of a
parameter is addressed by (name, global expert id, index in the whole parameter). A layout says which ranks keep
that element and where in their part; a form says in which tensor of a file, and where in it, the element lies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .experts import SwiGLU, swiglu_row

Bits = NDArray[np.int64]
Floats = NDArray[np.float64]
Key = tuple[str, int]
Index = tuple[int, ...]
Parameters = Mapping[Key, Bits]
Shapes = Mapping[str, tuple[int, ...]]


def indices(shape: Sequence[int]) -> list[Index]:
    """Every index of a tensor."""
    return [tuple(index) for index in np.ndindex(*shape)]


# ---- layouts (CKPT-01, -04, -06, -07) ----------------------------------------------------------------------

# The dimension of a parameter that the etp ranks of an expert divide among them; others they all hold whole.
CUT = {"gate": 0, "up": 0, "down": 1}


class Layout(NamedTuple):
    """How many ranks, how many along ep and etp (etp fastest, then ep), and the ids of each ep place."""

    world: int
    ep: int
    etp: int
    dealt: Sequence[Sequence[int]]


def in_runs(world: int, ep: int, etp: int, experts: int) -> Layout:
    """Experts dealt out in equal runs."""
    share = experts // ep
    return Layout(world, ep, etp, [[place * share + n for n in range(share)] for place in range(ep)])


def holds(rank: int, key: Key, index: Index, shape: Sequence[int], layout: Layout) -> Index | None:
    """Where in its own part of a parameter the rank keeps this element; none if it does not."""
    name, expert = key
    if expert not in layout.dealt[(rank // layout.etp) % layout.ep]:
        return None
    if name not in CUT:
        return index
    cut = CUT[name]
    width = shape[cut] // layout.etp
    place = index[cut] - (rank % layout.etp) * width
    return (*index[:cut], place, *index[cut + 1 :]) if 0 <= place < width else None


def part_shape(name: str, shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Shape of one rank's part of a parameter."""
    if name in CUT and shape[CUT[name]] % layout.etp != 0:
        raise ValueError(f"{name} {shape} does not divide by etp {layout.etp}")
    return tuple(size // layout.etp if CUT.get(name) == axis else size for axis, size in enumerate(shape))


def dealt_out(parameters: Parameters, layout: Layout) -> list[dict[Key, Bits]]:
    """What each rank holds: its experts' parameters, each element where the layout puts it."""
    known = [expert for experts in layout.dealt for expert in experts]
    if any(expert not in known for _, expert in parameters):
        raise ValueError(f"an expert that is not one of {known}")
    ranks: list[dict[Key, Bits]] = [{} for _ in range(layout.world)]
    for key, whole in parameters.items():
        for rank, held in enumerate(ranks):
            if key[1] not in layout.dealt[(rank // layout.etp) % layout.ep]:
                continue
            part = np.zeros(part_shape(key[0], whole.shape, layout), dtype=whole.dtype)
            for index in indices(whole.shape):
                place = holds(rank, key, index, whole.shape, layout)
                if place is not None:
                    part[place] = whole[index]
            held[key] = part
    return ranks


def gathered(ranks: Sequence[Mapping[Key, Bits]], layout: Layout) -> dict[Key, Bits]:
    """The whole parameters again: every element from all ranks that keep it, which must say the same."""
    if len(ranks) != layout.world:
        raise ValueError(f"{len(ranks)} ranks of {layout.world}")
    for rank, held in enumerate(ranks):
        for _, expert in held:
            if expert not in layout.dealt[(rank // layout.etp) % layout.ep]:
                raise ValueError(f"rank {rank} does not own expert {expert}")
    whole = {}
    for key in {key for held in ranks for key in held}:
        owners = [r for r in range(layout.world) if key[1] in layout.dealt[(r // layout.etp) % layout.ep]]
        if any(key not in ranks[rank] for rank in owners):
            raise ValueError(f"{key} is on some of its owners {owners} only")
        if len({ranks[rank][key].shape for rank in owners}) > 1:
            raise ValueError(f"parts of {key} differ in shape")
        shape = list(ranks[owners[0]][key].shape)
        if key[0] in CUT:
            shape[CUT[key[0]]] *= layout.etp
        made = np.zeros(shape, dtype=ranks[owners[0]][key].dtype)
        for index in indices(shape):
            said = set()
            for rank in owners:
                place = holds(rank, key, index, shape, layout)
                if place is not None:
                    said.add(int(ranks[rank][key][place]))
            if len(said) != 1:
                raise ValueError(f"{key} {index}: {len(said)} values")
            made[index] = said.pop()
        whole[key] = made
    return whole


def agreed(values: Sequence[Bits]) -> Bits:
    """The one value that all ranks hold."""
    if not values:
        raise ValueError("no rank, no value")
    for value in values:
        if (value.shape, value.dtype, value.tolist()) != (values[0].shape, values[0].dtype, values[0].tolist()):
            raise ValueError("ranks differ")
    return values[0]


# ---- forms (CKPT-10) ---------------------------------------------------------------------------------------


class Form(NamedTuple):
    """How a file stores experts: one stacked tensor; gate and up in one, `halves` or `interleaved`; transposed."""

    stacked: bool
    fused: str | None
    transposed: bool


def address(key: Key, index: Index, F: int, form: Form) -> tuple[str, Index]:
    """Tensor of the file, and index in it, where one element of gate, up or down lies."""
    name, expert = key
    i, j = index
    if form.fused is not None and name != "down":
        if form.fused == "halves":
            i = i if name == "gate" else F + i
        else:
            i = 2 * i if name == "gate" else 2 * i + 1
        name = "gate_up"
    if form.transposed:
        i, j = j, i
    return (name, (expert, i, j)) if form.stacked else (f"{expert}.{name}", (i, j))


def stored(parameters: Parameters, form: Form) -> dict[str, Bits]:
    """The tensors of a file in this form."""
    placed: dict[str, dict[Index, int]] = {}
    for key, whole in parameters.items():
        for index in indices(whole.shape):
            name, place = address(key, index, len(parameters["gate", 0]), form)
            places = placed.setdefault(name, {})
            if place in places:
                raise ValueError(f"two elements at {name} {place}")
            places[place] = int(whole[index])
    return {name: from_places(places) for name, places in placed.items()}


def from_places(places: Mapping[Index, int]) -> Bits:
    """The tensor that has these elements, no more and no fewer."""
    shape = [1 + max(place[axis] for place in places) for axis in range(len(next(iter(places))))]
    tensor = np.zeros(shape, dtype=np.int64)
    if len(places) != tensor.size:
        raise ValueError(f"{len(places)} elements for {shape}")
    for place, value in places.items():
        tensor[place] = value
    return tensor


def read(tensors: Mapping[str, Bits], form: Form, experts: int, F: int, D: int) -> dict[Key, Bits]:
    """The parameters in a file of this form, each element looked up where the form puts it."""
    whole = {}
    for expert in range(experts):
        for name, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
            made = np.zeros(shape, dtype=np.int64)
            for index in indices(shape):
                tensor, place = address((name, expert), index, F, form)
                made[index] = tensors[tensor][place]
            whole[name, expert] = made
    return whole


def fused_part(gate_FD: Bits, up_FD: Bits, fused: str, part: int, parts: int) -> Bits:
    """One etp rank's share of a fused matrix: its hidden units of gate and of up, fused again."""
    F, D = gate_FD.shape
    if F % parts != 0 or not 0 <= part < parts:
        raise ValueError(f"part {part} of {parts} of {F} hidden units")
    units = range(part * (F // parts), (part + 1) * (F // parts))
    made = np.zeros((2 * len(units), D), dtype=np.int64)
    for place, f in enumerate(units):
        for name, matrix in (("gate", gate_FD), ("up", up_FD)):
            for d in range(D):
                _, (row, column) = address((name, 0), (place, d), len(units), Form(False, fused, False))
                made[row, column] = matrix[f, d]
    return made


# ---- names, coverage, conversion (CKPT-02, -03, -08, -11) --------------------------------------------------


def all_alike(shapes: Sequence[Shapes]) -> bool:
    """Does every layout save the same names with the same global shapes?"""
    return all(
        sorted((name, *shape) for name, shape in one.items()) == sorted((name, *shape) for name, shape in other.items())
        for one in shapes
        for other in shapes
    )


Owner = tuple[int, int, str]


def shared_addresses(addresses: Mapping[Owner, tuple[str, int | None]]) -> list[tuple[Owner, Owner]]:
    """Two parameters in one place: the same name, and not two different indices of it."""
    found = []
    for a, (name_a, index_a) in addresses.items():
        for b, (name_b, index_b) in addresses.items():
            apart = index_a is not None and index_b is not None and index_a != index_b
            if a < b and name_a == name_b and not apart:
                found.append((a, b))
    return sorted(found)


class Written(NamedTuple):
    """A box of a global tensor that one rank writes: where it starts, and its values."""

    name: str
    start: Index
    values: Bits


def times_written(parts: Sequence[Written], shapes: Shapes) -> dict[str, Bits]:
    """How often each element is written; the same box with the same content, from several ranks, counts once."""
    times = {name: np.zeros(shape, dtype=np.int64) for name, shape in shapes.items()}
    seen: list[object] = []
    for part in parts:
        if part.name not in shapes or len(part.start) != len(shapes[part.name]) or part.values.ndim != len(part.start):
            raise ValueError(f"no tensor {part.name} of {part.values.ndim} dimensions")
        for first, size, whole in zip(part.start, part.values.shape, shapes[part.name], strict=True):
            if first < 0 or first + size > whole:
                raise ValueError(f"{part.name}: {first} .. {first + size} of {whole}")
        box = (part.name, part.start, part.values.shape, part.values.dtype, part.values.tolist())
        if box in seen:
            continue
        seen.append(box)
        for index in indices(part.values.shape):
            times[part.name][tuple(a + b for a, b in zip(part.start, index, strict=True))] += 1
    return times


def misfits(needed: Shapes, found: Shapes, optional: Collection[str] = ()) -> tuple[list[str], list[str], list[str]]:
    """Names that are missing, left over, and of another shape than needed."""
    missing, left_over, misshapen = [], [], []
    for name in sorted({*needed, *found}):
        if name not in found:
            if name not in optional:
                missing.append(name)
        elif name not in needed:
            if name not in optional:
                left_over.append(name)
        elif tuple(needed[name]) != tuple(found[name]):
            misshapen.append(name)
    return missing, left_over, misshapen


def conversion_faults(
    used: Sequence[str],
    present: Collection[str],
    filled: Sequence[str],
    needed: Collection[str],
    unused: Collection[str] = (),
) -> dict[str, list[str]]:
    """What a conversion did wrong, name by name: each tensor is to be used, each parameter filled, just once."""
    faults: dict[str, list[str]] = {
        kind: [] for kind in ("not_used", "used_twice", "invented", "not_filled", "filled_twice", "unknown")
    }
    for name in sorted({*used, *present}):
        times = list(used).count(name)
        if times == 0 and name not in unused:
            faults["not_used"].append(name)
        if times > 1:
            faults["used_twice"].append(name)
        if times > 0 and name not in present:
            faults["invented"].append(name)
    for name in sorted({*filled, *needed}):
        times = list(filled).count(name)
        if times == 0:
            faults["not_filled"].append(name)
        if times > 1:
            faults["filled_twice"].append(name)
        if times > 0 and name not in needed:
            faults["unknown"].append(name)
    return faults


# ---- upcycling and moving (CKPT-12, -13) -------------------------------------------------------------------


def upcycled(gate_FD: Bits, up_FD: Bits, down_DF: Bits, experts: int, pieces: int) -> dict[Key, Bits]:
    """Experts that are copies of the dense MLP, or of its pieces in turn."""
    F, D = gate_FD.shape
    if experts < 1 or pieces < 1 or experts % pieces != 0 or F % pieces != 0:
        raise ValueError(f"{experts} experts of {pieces} pieces of {F} hidden units")
    made = {}
    for expert in range(experts):
        units = [f for f in range(F) if f // (F // pieces) == expert % pieces]
        made["gate", expert] = np.array([[gate_FD[f, d] for d in range(D)] for f in units])
        made["up", expert] = np.array([[up_FD[f, d] for d in range(D)] for f in units])
        made["down", expert] = np.array([[down_DF[d, f] for f in units] for d in range(D)])
    return made


def upcycled_output(x_TD: Floats, weights_TK: Floats, dense: SwiGLU) -> Floats:
    """Every slot's copy answers what the dense MLP answers: the weights of a token add up before it."""
    y_TD = np.zeros(x_TD.shape)
    for t in range(len(x_TD)):
        for k in range(weights_TK.shape[1]):
            y_TD[t] += weights_TK[t, k] * swiglu_row(dense, x_TD[t])
    return y_TD


def at_places(parameters: Parameters, expert_of_place: Sequence[int]) -> dict[Key, Bits]:
    """What stands at each physical place after the move; every expert stands somewhere."""
    known = {expert for _, expert in parameters}
    if known != set(expert_of_place):
        raise ValueError(f"experts {known} on places {expert_of_place}")
    return {
        (name, place): whole
        for place, expert in enumerate(expert_of_place)
        for (name, owner), whole in parameters.items()
        if owner == expert
    }


def loads(by_place: Sequence[int], expert_of_place: Sequence[int], experts: int) -> list[int]:
    """Load of every expert: that of all places where it stands."""
    if len(by_place) != len(expert_of_place) or any(not 0 <= e < experts for e in expert_of_place):
        raise ValueError(f"{by_place} at {expert_of_place} for {experts} experts")
    return [sum(by_place[p] for p, e in enumerate(expert_of_place) if e == expert) for expert in range(experts)]

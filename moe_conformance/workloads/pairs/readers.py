"""What several surfaces have in common: options that are read from the config, the tokens and the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_conformance.workloads.pairs.options import Option, Row
from moe_conformance.workloads.records.features import halves_in_flight, in_flight
from moe_conformance.workloads.records.schedule import FORWARD_ALONE, executes
from moe_conformance.workloads.records.training import RouterBatch
from moe_conformance.workloads.records.workload import Workload

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
NO, YES = "no", "yes"

LAYOUTS = {
    "single": "one rank: nothing is sent, and libraries take a shortcut",
    "ep2": "one exchange group",
    "ep4": "four ranks exchange, so that an order of ranks is seen",
    "ep2-edp2": "replicas: gradients of experts are reduced",
    "tp2-ep2-edp2": "tokens of a tp group are apart from its experts'",
    "ep2-etp2": "experts are cut over ranks: rows are gathered and sums scattered",
}

KS = {
    "1": "no sum over slots; a dimension that `squeeze` removes",
    "2": "the usual one; two addends commute",
    "3": "odd: rows in threes; the order of three addends shows",
    "5": "a prime that divides neither tokens nor experts",
    "6": "of DeepSeek-V2; an even number that is no power of two",
    "10": "of Qwen3-Next: more than the 8 lanes of kernels for top-k",
}

HIDDEN = {
    "64": "a multiple of 64: whole tiles of kernels",
    "16": "a multiple of 16 only: what half-precision tensor cores take",
    "8": "a multiple of 8 only: 16 bytes in bfloat16, less than a tile",
    "2": "an even number: no 16-byte load in bfloat16",
    "odd": "no row but the first is aligned in bfloat16",
}
WIDTHS = {"64": 64, "16": 80, "8": 72, "2": 58, "odd": 67}  # D: at least twice E, as COST-08 has it

EXPERTS = {
    "power of two": "bits and shifts, equal shares of every power of two of ranks",
    "odd per rank": "each rank holds an odd number of experts",
    "other": "a multiple of no large power of two",
}

TOKENS = {
    "even": "all ranks and microbatches have as many tokens: equal splits",
    "uneven": "ranks have different numbers of tokens",
    "rank without": "a rank has no tokens: it takes part in collectives with nothing",
    "changing": "the number of tokens changes between microbatches: what is cached by size is stale",
    "one token": "each rank has one token: dimensions of 1",
}

SCHEDULES = {
    "one": "one microbatch",
    "in turn": "two microbatches, one after the other: gradients are added up",
    "in flight": "two microbatches between forward and backward: what is kept on the module is overwritten",
    "halves": "two microbatches between dispatch and combine",
    "inference": "a forward without gradients between two that have them",
}

MEMORY = {"plain": "what is there", "filled": "NaN in uninitialised memory: rows that nothing writes show"}
ASYNCHRONY = {
    "plain": "collectives are done when they return",
    "poisoned": "outputs hold NaN before wait(): early reads show",
}
LEADS = {"flat": "tokens (T, D)", "two_dims": "tokens (S, B, D): reshaped inside, and gradients back"}


def layout(values: Mapping[str, str] = LAYOUTS) -> Option:
    """Return the option of the layout."""
    return Option("layout", values, lambda workload: workload.layout.name)


def dtype(*names: str) -> Option:
    """Return the option of the dtype of tokens."""
    why = {
        "float32": "the usual one",
        "bfloat16": "8 bits of mantissa: sums in it lose addends",
        "float16": "largest number 65,504; products below 2^-14 lose bits",
        "float64": "what a library casts to float32 shows",
    }
    return Option("dtype", {name: why[name] for name in names or why}, lambda w: _name(w.config.dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def top_k(*values: str) -> Option:
    """Return the option of K."""
    return Option("top_k", {value: KS[value] for value in values or KS}, lambda w: str(w.config.top_k))


def hidden() -> Option:
    """Return the option of the divisors of D."""
    return Option("hidden", HIDDEN, lambda w: divisor(w.config.hidden))


def divisor(D: int) -> str:
    """Return the largest of 64, 16, 8 and 2 that divides D, or "odd".

    >>> [divisor(D) for D in (128, 48, 40, 58, 67)]
    ['64', '16', '8', '2', 'odd']
    """
    return next((str(size) for size in (64, 16, 8, 2) if D % size == 0), "odd")


def experts() -> Option:
    """Return the option of the divisors of E and of the number that a rank holds."""

    def read(workload: Workload) -> str:
        E, ep = workload.config.experts, workload.layout.ep
        return "power of two" if E & (E - 1) == 0 else "odd per rank" if E // ep % 2 else "other"

    return Option("experts", EXPERTS, read)


def experts_for(value: str, ep: int) -> int:
    """Return E of at least 12 for a value of the option."""
    return {"power of two": 16, "odd per rank": {1: 13, 2: 14, 4: 12}[ep], "other": {1: 12, 2: 12, 4: 24}[ep]}[value]


def sizes_of(row: Row, ep: int = 1) -> dict[str, Any]:
    """Return the fields of a config that the options experts, top_k, hidden and dtype of a row stand for."""
    return {
        "experts": experts_for(row["experts"], ep),
        "top_k": int(row["top_k"]),
        "hidden": WIDTHS[row["hidden"]],
        "dtype": DTYPES[row["dtype"]],
    }


def tokens(sizes: Callable[[Workload], Sequence[Sequence[int]]] = lambda workload: workload.tokens) -> Option:
    """Return the option of the numbers of tokens, given those of every microbatch on every rank."""

    def read(workload: Workload) -> str:
        numbers = [[*ranks] for ranks in sizes(workload)]
        if any(0 in ranks for ranks in numbers):
            return "rank without"
        if any(len({*ranks}) > 1 for ranks in numbers):
            return "uneven"
        apart = {ranks[0] for ranks in numbers if ranks}
        return "changing" if len(apart) > 1 else "one token" if apart == {1} else "even"

    return Option("tokens", TOKENS, read)


def turns_of(value: str, several: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return T by microbatch and rank, repeated as needed, for a value of the option `tokens`; of multiples."""
    turns = {
        "even": ((8,),) * 3,
        "uneven": ((9, 4, 13, 6), (4, 13, 6, 9), (13, 6, 9, 4)),
        "rank without": ((7, 0, 9, 4), (0, 9, 4, 7), (9, 4, 7, 0)),
        "changing": ((8,), (5,), (12,)),
        "one token": ((1,),) * 3,
    }[value]
    return tuple(tuple(several * T for T in ranks) for ranks in turns)


def schedule(*names: str) -> Option:
    """Return the option of the schedule."""
    return Option("schedule", {name: SCHEDULES[name] for name in names or SCHEDULES}, _scheduled)


def _scheduled(workload: Workload) -> str:
    how = workload.schedule
    if executes(how, "dispatch"):
        return "halves" if halves_in_flight(how) > 1 else ""
    if executes(how, *FORWARD_ALONE):
        return "inference"
    if executes(how, "repeat"):
        return ""
    return "in flight" if in_flight(how) > 1 else "in turn" if len(workload.batches) > 1 else "one"


SCHEDULED = {
    "one": "F0 B0",
    "in turn": "F0 B0 F1 B1",
    "in flight": "F0 F1 B1 B0",
    "halves": "D0 D1 C1 C0 B1 B0",
    "inference": "F0 I1 B0 N2",
}


def memory() -> Option:
    """Return the option of what uninitialised memory holds."""
    return Option("memory", MEMORY, lambda workload: workload.memory)


def asynchrony() -> Option:
    """Return the option of what asynchronous collectives leave before they are waited for."""
    return Option("asynchrony", ASYNCHRONY, lambda workload: workload.asynchrony)


def lead() -> Option:
    """Return the option of the leading dimensions of x."""
    return Option("lead", LEADS, lambda workload: workload.lead)


def recompute() -> Option:
    """Return the option of activation recomputation of whole forwards."""
    why = {NO: "activations are kept", "all": "forwards run again in the backward: state that they change shows"}
    return Option("recompute", why, lambda workload: workload.twist.recomputed or NO)


def yes(name: str, why: str, read: Callable[[Workload], object]) -> Option:
    """Return an option that is there or not."""
    return Option(name, {NO: "as if there were no such option", YES: why}, lambda w: YES if read(w) else NO)


# ---- routers of a model in steps: `RouterBatch` by call and rank ----------------------------------------------------

MASKS = {
    "none": "no mask is passed",
    "end": "all sequences end alike: the last rank of a cp or tp group has most padding",
    "ragged": "sequences of different lengths: each has its own number of tokens",
    "one rank": "all tokens of a rank are padding: its sums are of nothing",
}
MODES = {
    NO: "training alone",
    "evaluation": "forwards in evaluation lie between: they count and add nothing",
    "no_grad": "forwards in training without gradients lie between",
}


def _steps(workload: Workload) -> list[list[list[RouterBatch]]]:
    """Return the microbatches of every rank in every step."""
    calls = [call.given for call in workload.calls if call.given and "batches" in call.given[0]]
    return [[[*given["batches"]] for given in call] for call in calls]


def _mask_of(workload: Workload) -> str:
    """Return the kind of padding masks of a script; "" if there are several kinds, or one of all tokens."""
    kinds = set()
    for step in _steps(workload):
        masked = [[batch for batch in of_rank if batch.padding_T is not None] for of_rank in step]
        of_ranks = [torch.cat([batch.padding_T for batch in each]) for each in masked if each]  # type: ignore[misc]
        if of_ranks and len(of_ranks) == len(step):
            kinds.add(_mask_kind(of_ranks, [_columns(each) for each in masked]))
    return kinds.pop() if len(kinds) == 1 else "" if kinds else "none"


def _columns(batches: Sequence[RouterBatch]) -> list[Tensor]:
    """Return the masks (S, B) of a rank's microbatches; those of one sequence each are put side by side."""
    masks_SB = [batch.padding_T.view(batch.x[0].shape[:2]) for batch in batches if batch.padding_T is not None]
    return [torch.cat(masks_SB, 1)] if all(mask_SB.shape[1] == 1 for mask_SB in masks_SB) else masks_SB


def _mask_kind(of_ranks: Sequence[Tensor], masks_SB: Sequence[Sequence[Tensor]]) -> str:
    """Return the kind of the masks of a step, given those of each rank, and their microbatches.

    Where sequences end early their last ranks may have no token either: "one rank" is the first.
    """
    whole = [bool(mask.all()) for mask in of_ranks]
    if whole[0]:
        return "" if all(whole) else "one rank"
    alike = [torch.equal(mask, mask[:, :1].expand_as(mask)) for masks in masks_SB for mask in masks]
    return "end" if all(alike) else "ragged"


def mask() -> Option:
    """Return the option of the padding mask of routers in steps."""
    return Option("mask", MASKS, _mask_of)


def modes() -> Option:
    """Return the option of further forwards of routers in steps."""

    def read(workload: Workload) -> str:
        batches = [batch for step in _steps(workload) for of_rank in step for batch in of_rank]
        found = {batch.mode for batch in batches} - {"training"}
        return NO if not found else found.pop() if len(found) == 1 else ""

    return Option("modes", MODES, read)


def microbatches() -> Option:
    """Return the option of the largest number of microbatches of a step."""
    why = {"1": "one in a step", "2": "losses and counters add up", "4": "means over microbatches are no halves"}

    def read(workload: Workload) -> str:
        trained = [[batch for batch in step[0] if batch.mode == "training"] for step in _steps(workload)]
        return str(max(map(len, trained), default=0))

    return Option("microbatches", why, read)

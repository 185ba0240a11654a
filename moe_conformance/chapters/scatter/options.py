"""The options of scatter-add and scripts of their pairs."""

from __future__ import annotations

from moe_conformance.chapters.scatter.workloads.scatter import Recipe, script
from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.pairs import readers
from moe_conformance.workloads.pairs.options import Option, Row, Rule, Surface
from moe_conformance.workloads.pairs.readers import DTYPES, LAYOUTS, WIDTHS
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Workload

_SOURCES = {
    "none": "nothing is added: a kernel is launched on no row, or not at all",
    "fewer": "most output rows get nothing",
    "more": "several source rows are added to each output row, in one order",
}
_INDEX = {"spread": "any output row but the last", "one row": "all sources meet in one row: the longest sum"}
_ROWS = {"none": "an output without rows", "one": "a dimension of 1", "several": "the usual one"}


def _given(workload: Workload) -> tuple[int, int, int]:
    """Return the number of output rows, of source rows, and of output rows that the index names."""
    given = workload.calls[0].given[0]
    return len(given["out_ND"]), len(given["src_JD"]), len(given["index_J"].unique())


def _sources(workload: Workload) -> str:
    rows, sources, _ = _given(workload)
    return "none" if not sources else "fewer" if sources < rows else "more"


def _index(workload: Workload) -> str:
    rows, _, named = _given(workload)
    return "one row" if named == 1 and rows > 1 else "spread"


def _rows(workload: Workload) -> str:
    rows = _given(workload)[0]
    return {0: "none", 1: "one"}.get(rows, "several")


_OPTIONS = (
    readers.layout({"single": LAYOUTS["single"], "ep2": "two processes, whose bits are compared"}),
    readers.dtype(),
    readers.hidden(),
    Option("rows", _ROWS, _rows),
    Option("sources", _SOURCES, _sources),
    Option("index", _INDEX, _index),
)
_RULES = (
    Rule({"rows": ("none",), "sources": ("fewer", "more")}, "there is no row to add to"),
    Rule({"rows": ("none", "one"), "index": ("one row",)}, "there are no others"),
    Rule({"rows": ("one",), "sources": ("fewer",)}, "fewer than one is none"),
    Rule({"sources": ("none",), "index": ("one row",)}, "the index names no row"),
)


def _make(name: str, row: Row, layout: Layout) -> Workload:
    rows = {"none": 0, "one": 1, "several": 9}[row["rows"]]
    sources = {"none": 0, "fewer": 5, "more": 70}[row["sources"]]
    recipe = Recipe(name, rows, sources, DTYPES[row["dtype"]], row["index"] == "one row")
    return script(recipe, Config(hidden=WIDTHS[row["hidden"]], dtype=recipe.dtype), layout)


SURFACES = (Surface("scatter", (Script("scatter_add"),), _OPTIONS, _RULES, _make, first_variant=True),)

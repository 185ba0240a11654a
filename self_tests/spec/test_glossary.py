"""The glossary names the option of each library for every field of Config, and those options exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from moe_conformance.contract import Config
from tools import spec_pages

# Where the options of each library are written. The files are parsed, not imported: that takes seconds and a GPU.
SOURCES = {
    "megatron": (
        "core/distributed/distributed_data_parallel_config.py",
        "core/model_parallel_config.py",
        "core/optimizer/optimizer_config.py",
        "core/transformer/transformer_config.py",
        "core/transformer/moe/moe_utils.py",
    ),
    "torchtitan": (
        "components/optimizer/optimizer.py",
        "config/configs.py",
        "models/common/feed_forward.py",
        "models/common/linear.py",
        "models/common/moe.py",
        "models/common/token_dispatcher.py",
    ),
    "transformers": (
        "configuration_utils.py",
        "distributed/configuration_utils.py",
        "training_args.py",
        *(
            f"models/{model}/configuration_{model}.py"
            for model in ("deepseek_v2", "deepseek_v3", "deepseek_v4", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe")
        ),
    ),
    "deepspeed": ("moe/layer.py", "moe/sharded_moe.py", "module_inject/auto_ep_presets/base.py"),
}
# `Class.field`, `Class.Config.field` or `function(argument)`
_OPTION = re.compile(r"`(\w+(?:\.Config)?)(?:\.(\w+)|\((\w+)\))`")


def _rows(heading: str) -> Sequence[Sequence[str]]:
    """Return the cells of the table under a heading, without its head."""
    section = spec_pages.glossary().split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _named(column: int) -> Iterator[str]:
    """Yield the options of one library as `owner.name`, from the last columns of both tables of options."""
    for heading in ("Ranks", "Options"):
        for row in _rows(heading):
            for owner, field, argument in _OPTION.findall(row[column - 4]):
                yield f"{owner}.{field or argument}"


def _written(tree: ast.AST, path: str = "") -> Iterator[str]:
    """Yield every annotated field and every argument below a syntax tree, as `owner.name`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _written(node, f"{path}.{node.name}".lstrip("."))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield f"{path}.{node.target.id}"
        elif isinstance(node, ast.FunctionDef):
            owner = path if node.name == "__init__" else node.name
            yield from (f"{owner}.{argument.arg}" for argument in node.args.args)


def _options_of(library: str) -> set[str]:
    found = find_spec(library)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{library} is not installed")
    for folder in map(Path, found.submodule_search_locations):
        trees = [ast.parse((folder / each).read_text(encoding="utf-8")) for each in SOURCES[library]]
        return {option for tree in trees for option in _written(tree)}
    raise AssertionError(f"{library} has no folder")


class TestOptions:
    """The table of options."""

    def test_it_has_a_row_for_each_option_of_config(self) -> None:
        """In the order of the dataclass and its sections, so that a new field has to be entered."""
        assert [f"`{name}`" for name in Config().options()] == [row[0] for row in _rows("Options")]

    def test_each_cell_names_an_option_or_says_none(self) -> None:
        """No cell is empty."""
        assert [] == [row[0] for row in _rows("Options") for cell in row[1:] if not ("`" in cell or "none" in cell)]

    @pytest.mark.parametrize("library", SOURCES)
    def test_the_named_options_exist(self, library: str) -> None:
        """In the installed version of the library."""
        column = list(SOURCES).index(library)
        assert set() == set(_named(column)) - _options_of(library)

"""The engine's sources contain no words of MoE, no metaphors for terms of the field, and no vague names."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

ENGINE = Path(__file__).parents[2] / "moe_conformance" / "engine"
FOREIGN = re.compile(r"moe|expert|token|routing|router|top_?k", re.IGNORECASE)
OWN_PATH = re.compile(r"\bmoe_conformance\.engine\b")

# Each stood for a term of the field: fork server, agent, listener, wait, message, idle, children, state of a group, ...
METAPHORS = re.compile(
    r"nursery|outpost|vigil|parcel|offspring|stillness|reception|doorkeeper|fleet|\b(hall|house|letter|plot|scene)s?\b",
    re.IGNORECASE,
)
VAGUE = frozenset({"told", "beside", "own", "asked", "each"})


def foreign_words(source: str) -> list[str]:
    """Return `line: word` for every word of MoE in a source, without the engine's own import path."""
    return _found(FOREIGN, OWN_PATH.sub("", source))


def metaphors(source: str) -> list[str]:
    """Return `line: word` for every metaphor in a source."""
    return _found(METAPHORS, source)


def vague_names(source: str) -> list[str]:
    """Return the vague names that a source gives to a variable, argument, attribute, function or class."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            names.append(node.id)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
        elif isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
    return [name for name in names if name.lstrip("_") in VAGUE]


def _found(words: re.Pattern[str], source: str) -> list[str]:
    lines = source.splitlines()
    return [f"{number}: {word[0]}" for number, line in enumerate(lines, 1) for word in words.finditer(line)]


def _in_engine(find: Callable[[str], list[str]]) -> dict[str, list[str]]:
    files = sorted(ENGINE.rglob("*.py"))
    assert files
    return {file.name: found for file in files if (found := find(file.read_text("utf-8")))}


class TestVocabulary:
    def test_no_file_of_the_engine_speaks_of_moe(self) -> None:
        """The engine could be its own package: nothing in it names an expert, a token or a routing."""
        assert {} == _in_engine(foreign_words)

    def test_a_foreign_word_is_found_wherever_it_stands(self) -> None:
        """Names, comments and strings count, the engine's own import path does not."""
        source = "from moe_conformance.engine import pool\nnum_Experts = 2  # per token\nTOPK = 'router'\n"
        assert ["2: Expert", "2: token", "3: TOPK", "3: router"] == foreign_words(source)

    def test_no_file_of_the_engine_uses_a_metaphor(self) -> None:
        """The engine names its parts in the terms of the field."""
        assert {} == _in_engine(metaphors)

    def test_a_metaphor_is_found_wherever_it_stands(self) -> None:
        """Names, comments and strings count; a longer word that contains a short one does not."""
        source = "class NurseryOpening:  # the hall\n    shallow = 'an outpost'\n"
        assert ["1: Nursery", "1: hall", "2: outpost"] == metaphors(source)

    def test_no_name_of_the_engine_is_vague(self) -> None:
        """A name says what it holds: `rank_payload`, not `own`."""
        assert {} == _in_engine(vague_names)

    def test_a_vague_name_is_found_wherever_it_is_given(self) -> None:
        """Variables, arguments, attributes and functions count, words of texts do not."""
        source = "def told(own):\n    for each in own._asked:\n        'beside'\n"
        assert ["_asked", "each", "own", "own", "told"] == sorted(vague_names(source))

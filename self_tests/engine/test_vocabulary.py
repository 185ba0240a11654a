"""The engine runs functions on ranks and has no word for what they compute."""

from __future__ import annotations

import re
from pathlib import Path

ENGINE = Path(__file__).parents[2] / "moe_conformance" / "engine"
FOREIGN = re.compile(r"moe|expert|token|routing|router|top_?k", re.IGNORECASE)
OWN_PATH = re.compile(r"\bmoe_conformance\.engine\b")


def foreign_words(source: str) -> list[str]:
    """Return `line: word` for every word of MoE in a source, less the engine's own import path."""
    lines = OWN_PATH.sub("", source).splitlines()
    return [f"{at}: {word}" for at, line in enumerate(lines, 1) for word in FOREIGN.findall(line)]


class TestVocabulary:
    def test_no_file_of_the_engine_speaks_of_moe(self):
        """The engine could be its own package: nothing in it names an expert, a token or a routing."""
        files = sorted(ENGINE.rglob("*.py"))
        assert files
        assert {} == {file.name: words for file in files if (words := foreign_words(file.read_text("utf-8")))}

    def test_a_foreign_word_is_found_wherever_it_stands(self):
        """Names, comments and strings count, the engine's own import path does not."""
        source = "from moe_conformance.engine import pool\nnum_Experts = 2  # per token\nTOPK = 'router'\n"
        assert ["2: Expert", "2: token", "3: TOPK", "3: router"] == foreign_words(source)

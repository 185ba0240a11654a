"""The spec as pages of the site: one for each chapter, an index, two tables of what others check and claim, a glossary.

docs/spec/other_suites.toml holds what ten other test suites check, with the requirements that cover it; its page
says beside every behaviour which checks decide it today, and what the others wait for. claims.toml holds what public
reviews claimed of a load meter and of forced routing, and its page says the same of each claim. The index is README.md
there, with the number of requirements of every chapter.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_conformance import discovery, spec
from moe_conformance.spec import Requirement
from moe_conformance.spec.checks import by_requirement
from moe_conformance.spec.places import checked

FOLDER = Path(__file__).parents[1] / "docs" / "spec"
INDEX, OTHERS, CLAIMS = "README.md", "other_suites.toml", "claims.toml"


def pages() -> dict[str, str]:
    """Return every page by its file name."""
    chapters: dict[str, list[Requirement]] = {}
    for each in spec.load().values():
        chapters.setdefault(each.chapter, []).append(each)
    found = {f"{chapter}.md": _chapter(chapter, listed) for chapter, listed in chapters.items()}
    checks = _checks()
    tables = {"other_suites.md": _others(read_others(), checks), "claims.md": _claims(read_claims(), checks)}
    return {INDEX: _index(chapters), **tables, **found}


def _checks() -> Mapping[str, Sequence[str]]:
    """Return the names of the functions that decide each requirement."""
    return {each: [check.name.rpartition(".")[2] for check in some] for each, some in by_requirement().items()}


def read_others() -> Sequence[Mapping[str, Any]]:
    """Return the behaviours that other suites check."""
    behaviours: Sequence[Mapping[str, Any]] = tomllib.loads((FOLDER / OTHERS).read_text(encoding="utf-8"))["behaviour"]
    return behaviours


def read_claims() -> Sequence[Mapping[str, Any]]:
    """Return the claims of public reviews."""
    claims: Sequence[Mapping[str, Any]] = tomllib.loads((FOLDER / CLAIMS).read_text(encoding="utf-8"))["claim"]
    return claims


def _index(chapters: Mapping[str, Sequence[Requirement]]) -> str:
    rows = [
        (
            f"[{chapter}]({chapter}.md)",
            ", ".join(dict.fromkeys(each.id.split("-")[0] for each in listed)),
            len(listed),
            sum(each.id in checked() for each in listed),
        )
        for chapter, listed in chapters.items()
    ]
    every = [each for listed in chapters.values() for each in listed]
    total = ("all", "", len(every), sum(each.id in checked() for each in every))
    table = _table(("chapter", "ids", "requirements", "with a check"), [*rows, total])
    head = (FOLDER / INDEX).read_text(encoding="utf-8")
    for name in (OTHERS, CLAIMS):
        head = head.replace(f"({name})", f"({name.removesuffix('.toml')}.md)")
    return f"{head}\n{table}\n"


def _chapter(chapter: str, requirements: Sequence[Requirement]) -> str:
    return _page(chapter.replace("_", " ").capitalize(), *(_entry(each) for each in requirements))


def _entry(each: Requirement) -> str:
    rows = [("formula", each.formula), ("degenerate cases", each.degenerate), ("source", each.source)]
    state = f"decided in the {each.profile} profile"
    if each.id not in checked():
        state = f"no check yet{_why(each)}"
    return "\n\n".join(
        [
            f"## {each.id}",
            f"**{each.sentence}**",
            "\n".join(f"- {name}: {text}" for name, text in rows),
            f"{each.level}, since {each.since}; {state}.",
        ]
    )


def _why(each: Requirement) -> str:
    return f": {each.without_check}" if each.without_check else ""


def _others(behaviours: Iterable[Mapping[str, Any]], checks: Mapping[str, Sequence[str]]) -> str:
    ordered = sorted(behaviours, key=lambda each: each["number"])
    rows = [(each["number"], each["words"], *_decided(each, checks)) for each in ordered]
    wholly = sum(not waiting for *_, waiting in rows)
    partly = sum(bool(decided and waiting) for *_, decided, waiting in rows)
    return _page(
        "What other test suites check",
        "Behaviours that the tests of Megatron-LM, torchtitan, DeepEP, TransformerEngine, DeepSpeed, Tutel, "
        "Megatron-Bridge, vLLM, SGLang and transformers check, well or not, and the requirements that cover them: with "
        "the checks that run, or with what is missing for one.",
        f"Of {len(rows)} behaviours checks decide {wholly} wholly and {partly} in part.",
        _table(("", "behaviour", "decided by", "not decided"), rows),
    )


def _claims(claims: Iterable[Mapping[str, Any]], checks: Mapping[str, Sequence[str]]) -> str:
    rows = [
        (each["name"], each["words"], each["verdict"], each.get("code", ""), *_decided(each, checks)) for each in claims
    ]
    return _page(
        "What was claimed of load meters, forced routing, fast paths and scatter",
        "Claims of public pull requests to Megatron-LM and torchtitan and of their reviews, in the words of this "
        "project, and what became of each; what the code itself does, by its findings, where it was judged; and the "
        "requirements that hold what is right of the claim, with the checks that decide them.",
        _table(("name", "claim", "verdict", "what the code does", "decided by", "not decided"), rows),
    )


def _decided(behaviour: Mapping[str, Any], checks: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """Return the requirements that a check decides, each with its functions, and why what else there is is not."""
    if not behaviour["requirements"]:
        return "", behaviour["reason"]
    requirements = spec.load()
    undecided = [behaviour["undecided"]] if "undecided" in behaviour else []
    waiting: dict[str, list[str]] = {}
    decided = [each for each in behaviour["requirements"] if each in checks]
    for each in behaviour["requirements"]:
        if each not in checks:
            waiting.setdefault(f"no check yet{_why(requirements[each])}", []).append(each)
    return (
        "; ".join(f"{each} {', '.join(f'`{name}`' for name in dict.fromkeys(checks[each]))}" for each in decided),
        "; ".join([*(f"{', '.join(ids)}: {reason}" for reason, ids in waiting.items()), *undecided]),
    )


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", *parts]) + "\n"


GLOSSARY = Path(__file__).parents[1] / "docs" / "glossary.md"
_PLACE = "| [options of chapters]"  # the row of the stored table that the rows of chapters replace


def glossary() -> str:
    """Return the page of the glossary: docs/glossary.md with the options of all chapters, from their options.md."""
    lines = GLOSSARY.read_text("utf-8").splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(_PLACE))
    lines[at : at + 1] = [row for chapter in discovery.chapters() for row in _options(chapter)]
    return "\n".join(lines) + "\n"


def _options(chapter: str) -> list[str]:
    """Return the rows of a chapter's table, none if it has no section of `Config`."""
    path = discovery.FOLDER / chapter / "options.md"
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return [line for line in lines if line.startswith("| `")]

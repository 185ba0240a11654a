"""What a run has found, as text for the terminal and for docs/mutants.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.mutants.changes import Mutant
from tools.mutants.survivors import FILE, Key, entry
from tools.mutants.trial import Verdict

GOAL = 0.95
_DOCUMENT = Path("docs") / "mutants.md"
_BEGIN, _END = "<!-- figures: written by mutants -->", "<!-- end of figures -->"


@dataclass(frozen=True)
class Results:
    """The chapter of each file, every mutant that was tried and what became of it, and what is known of survivors."""

    chapters: Mapping[str, str]
    verdicts: Sequence[tuple[Mutant, Verdict]]
    reasons: Mapping[Key, str]
    stale: Sequence[Key]
    not_held: Sequence[str]

    def survivors(self) -> list[Mutant]:
        """Return what no test noticed, in the order of files and lines."""
        found = [mutant for mutant, verdict in self.verdicts if not verdict.noticed]
        return sorted(found, key=lambda mutant: (mutant.file, mutant.line, mutant.after))

    def same(self) -> list[Mutant]:
        """Return the survivors that are known to be the same program."""
        return [mutant for mutant in self.survivors() if mutant.key in self.reasons]

    def share(self) -> float:
        """Return the share of the mutants that were noticed, of those that are not the same program."""
        return 1 - (len(self.survivors()) - len(self.same())) / (len(self.verdicts) - len(self.same()))


def problems(results: Results, goal: float) -> list[str]:
    """Return what must not be, each with what to do."""
    found = [f"{reason}" for reason in results.not_held]
    if results.share() < goal:
        found.append(f"only {results.share():.1%} of the mutants that differ are noticed, not {goal:.0%}")
    for mutant in results.survivors():
        if mutant.key not in results.reasons:
            text = f"nothing notices {mutant}\nwrite a test that does or, if none can, add to {FILE}:\n{entry(mutant)}"
            found.append(text)
    for mutant, verdict in results.verdicts:
        if verdict.noticed and mutant.key in results.reasons:
            found.append(f"{FILE} says that nothing can notice {mutant}\nbut {verdict.by} does: take the entry out")
    for file, function, before, after in results.stale:
        found.append(f"{FILE} has {file}, {function}: {before}  ->  {after}\nbut no such mutant is made: take it out")
    return found


def markdown(results: Results) -> str:
    """Return the table by chapter, and every survivor with its reason."""
    rows = {chapter: [0, 0, 0] for chapter in sorted(set(results.chapters.values()))}
    for mutant, verdict in results.verdicts:
        row = rows[results.chapters[mutant.file]]
        row[0] += 1
        row[1] += verdict.noticed
        row[2] += not verdict.noticed and mutant.key in results.reasons
    rows["all"] = [sum(row[place] for row in rows.values()) for place in (0, 1, 2)]
    lines = ["| chapter | mutants | noticed | the same program | not noticed |", "|---|---|---|---|---|"]
    for chapter, (tried, noticed, same) in rows.items():
        lines.append(f"| {chapter} | {tried} | {noticed} ({noticed / tried:.1%}) | {same} | {tried - noticed - same} |")
    lines += ["", f"Of the mutants that are not the same program, {results.share():.1%} are noticed."]
    return "\n".join([*lines, "", _means(results), *_listed(results)])


def write(root: Path, text: str) -> None:
    """Put the figures into docs/mutants.md."""
    document = root / _DOCUMENT
    before, _, rest = document.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    document.write_text(before + "\n\n".join((_BEGIN, text, _END)) + after)


def _means(results: Results) -> str:
    """Say what noticed the mutants, other than a test of a pair."""
    noticed = [(mutant, verdict) for mutant, verdict in results.verdicts if verdict.noticed]
    examples = sum(verdict.by.startswith(mutant.file) for mutant, verdict in noticed)
    timed = sum(verdict.by == "time" for _, verdict in noticed)
    imported = sum(verdict.by.startswith("import") for _, verdict in noticed)
    return (
        f"Of those noticed, {examples} were by the examples in their own docstrings alone, {timed} by the clock, "
        f"{imported} could not be imported, and all others failed a test of a pair."
    )


def _listed(results: Results) -> list[str]:
    survivors = results.survivors()
    return [] if not survivors else ["", *(
        f"* `{mutant.file}`, `{mutant.function}`: `{mutant.before}` → `{mutant.after}`: "
        f"{results.reasons.get(mutant.key, 'nothing notices it')}"
        for mutant in survivors
    )]  # fmt: skip

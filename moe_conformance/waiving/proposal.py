"""Writes a waiver for failures of a run, to be completed by a person."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from moe_conformance.waiving.records import Fault, Item


def proposal(
    requirements: Sequence[str], items: Sequence[Item], fault: Fault, versions: Mapping[str, str], backend: str
) -> str:
    """Return a waiver for items that have the same fault, as TOML to be completed by a person.

    The `size` of the fault is the largest of all items.
    """
    version = versions.get(backend)
    wanted = f"{backend}=={version}" if version else " ".join(f"{name}=={v}" for name, v in versions.items())

    def listed(values: Iterable[str]) -> str:
        return "[" + ", ".join(_quoted(value) for value in sorted(set(values))) + "]"

    return "\n".join(
        [
            "[[waiver]]",
            'id = "?"',
            f"requirements = {listed(requirements)}",
            f"variants = {listed(item.variant for item in items)}",
            f"layouts = {listed(item.layout for item in items)}",
            f"workloads = {listed(item.workload or 'drawn' for item in items)}",
            f"reason = {_quoted(fault.message.splitlines()[0])}",
            'evidence = "?"',
            'owner = "?"',
            "expires = ?",
            f"versions = {listed([wanted])}",
            f"example = {_quoted(items[0].name)}",
            "",
            "[[waiver.failure]]",
            f"kind = {_quoted(fault.kind)}",
            f"stage = {_quoted(fault.stage)}",
            'words = ["?"]',
            *([] if fault.size is None else [f"at_most = {2 * fault.size:.1g}"]),
        ]
    )


def _quoted(text: str) -> str:
    """Return a TOML basic string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'

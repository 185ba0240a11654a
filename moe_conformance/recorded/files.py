"""A recorded case in its two files: a JSON document, and the tensors that it refers to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as parse
from safetensors.torch import save
from torch import Tensor

from moe_conformance import reading
from moe_conformance.recorded.codec import Encoder, decode
from moe_conformance.recorded.judging import Verdict
from moe_conformance.recorded.pools import BadRecording
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.workload import Workload

FORMAT = 1
TENSORS = ".safetensors"


@dataclass(frozen=True)
class Ran:
    """An outcome without its workload, of which the fingerprint is kept; or the reason why there is none."""

    workload: str  # fingerprint
    why_not: str = ""
    observed: Mapping[str, Any] = field(default_factory=dict)  # the other fields of the outcome, as they are stored
    tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    def outcome(self, workload: Workload) -> Outcome:
        """Return the outcome of a workload, whose fingerprint the caller has compared; each time a new one.

        Raises:
            BadRecording: what is stored is no outcome.
        """
        try:
            return Outcome(
                workload=workload, **{name: decode(part, self.tensors) for name, part in self.observed.items()}
            )
        except TypeError as error:
            raise BadRecording(f"it holds no outcome: {error}") from error


@dataclass(frozen=True)
class Recorded:
    """A case of a library at some versions, what its ranks and those of its twins observed, and the verdicts on it."""

    backend: str
    versions: Mapping[str, str]
    suite: str  # the version of this package
    variant: str
    layout: str
    workload: str
    variants: tuple[str, ...]  # all of the backend: a check of twins may ask for them
    ran: Ran
    twins: Mapping[str, Ran] = field(default_factory=dict)  # by `Twin.how`
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)  # by the check's name

    @property
    def id(self) -> str:
        """The id of the case, which names its files."""
        return f"{self.variant}-{self.layout}-{self.workload}"


class Recorder:
    """Encodes the outcomes of one case, whose tensors share a file."""

    def __init__(self, text: Callable[[str], str]) -> None:
        """Take what is stored in place of a string."""
        self._encoder = Encoder(text=text)

    def ran(self, fingerprint: str, outcome: Outcome | None, why_not: str = "") -> Ran:
        """Return an outcome as it is stored, without its tensors; those are complete after the last outcome.

        Raises:
            BadRecording: it holds something that is no data.
        """
        names = [each.name for each in fields(Outcome) if each.name != "workload"] if outcome is not None else []
        return Ran(fingerprint, why_not, {name: self._encoder.encode(getattr(outcome, name)) for name in names})

    def complete(self, recorded: Recorded) -> Recorded:
        """Return what was recorded, with the tensors."""
        tensors = self._encoder.pools.flat()
        twins = {how: replace(ran, tensors=tensors) for how, ran in recorded.twins.items()}
        return replace(recorded, ran=replace(recorded.ran, tensors=tensors), twins=twins)


def write(folder: Path, recorded: Recorded) -> int:
    """Write a recorded case into a folder, and return the number of bytes."""
    path = folder / f"{recorded.id}.json"
    path.write_text(_text(recorded), encoding="utf-8")
    path.with_suffix(TENSORS).write_bytes(save(dict(recorded.ran.tensors)))
    return path.stat().st_size + path.with_suffix(TENSORS).stat().st_size


def read(path: Path) -> Recorded:
    """Return the recorded case whose document a path names.

    Raises:
        BadRecording: the files are not there, or hold no recorded case.
    """
    try:
        content = reading.json_of(path)
        tensors = parse(path.with_suffix(TENSORS).read_bytes())
        if content["format"] != FORMAT:
            raise BadRecording(f"its format is {content['format']!r}; this version reads format {FORMAT}")
        twins = {str(how): _ran(ran, tensors) for how, ran in content["twins"].items()}
        verdicts = {str(check): Verdict(**verdict) for check, verdict in content["verdicts"].items()}
        texts = {name: content[name] for name in ("backend", "suite", "variant", "layout", "workload")}
        if not all(isinstance(text, str) for text in texts.values()):
            raise BadRecording("a name in it is no text")
        recorded = Recorded(
            **texts,
            versions=dict(content["versions"]),
            variants=tuple(map(str, content["variants"])),
            ran=_ran(content["ran"], tensors),
            twins=twins,
            verdicts=verdicts,
        )
        if recorded.id != path.stem:  # which names the files that are written
            raise BadRecording(f"it holds the case {recorded.id!r}")
        return recorded
    except BadRecording as error:
        raise BadRecording(f"{path}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise BadRecording(f"{path} is no recorded case: {type(error).__name__}: {error}") from error


def _ran(content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Ran:
    return Ran(str(content["workload"]), str(content["why_not"]), dict(content["observed"]), tensors)


def _text(recorded: Recorded) -> str:
    """Return the document, with verdicts and the fields of ranks on lines of their own, for a reader and for diffs."""
    head = {name: getattr(recorded, name) for name in ("backend", "versions", "suite", "variant", "layout", "workload")}
    lines = [f'"format": {FORMAT}', *(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items())]
    lines.append(f'"variants": {json.dumps(recorded.variants)}')
    verdicts = {check: json.dumps(asdict(verdict)) for check, verdict in recorded.verdicts.items()}
    lines.append(f'"verdicts": {_object(verdicts)}')
    lines.append(f'"ran": {_ran_text(recorded.ran)}')
    lines.append(f'"twins": {_object({how: _ran_text(ran) for how, ran in recorded.twins.items()})}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _ran_text(ran: Ran) -> str:
    compact = json.dumps(ran.observed, separators=(",", ":"), allow_nan=False)
    return f'{{"workload": {json.dumps(ran.workload)}, "why_not": {json.dumps(ran.why_not)}, "observed": {compact}}}'


def _object(texts: Mapping[str, str]) -> str:
    return "{" + ",".join(f"\n {json.dumps(name)}: {text}" for name, text in texts.items()) + "}"

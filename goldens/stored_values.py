"""Stored values of the oracles, which a later change of an oracle does not change.

A chapter is one safetensors file and its entry in manifest.json. A file is read only if it is, byte for byte,
the one that the manifest describes. Names in a file read `case/in/quantity` and `case/out/quantity`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from safetensors.torch import load as parse
from safetensors.torch import save
from torch import Tensor

MANIFEST = "manifest.json"
SUFFIX = ".safetensors"
_INNERMOST = re.compile(r"\{[^{}]*\}|\[[^\[\]{}]*\]")  # objects and lists of a manifest that take one line


class GoldenError(Exception):
    """A golden cannot be used; the sentence names the chapter, what is wrong, and what to do."""


class MissingError(GoldenError):
    """There is no file, no entry or no tensor of that name."""


class TruncatedError(GoldenError):
    """A file is shorter than it was written."""


class AlteredError(GoldenError):
    """A file or an entry is not as it was written."""


class UnusedError(GoldenError):
    """A file belongs to no chapter."""


class DifferentError(GoldenError):
    """A value is not the stored one, or is of another dtype or shape."""


@dataclass(frozen=True)
class Form:
    """What a stored tensor looks like."""

    dtype: str  # "float64"
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """What the manifest says of a chapter: what is in its file, and where that came from."""

    requirements: tuple[str, ...]  # whose oracles it holds values of
    seed: int  # of the inputs
    tensors: Mapping[str, Form]
    bytes: int
    sha256: str  # of the file
    suite: str  # version
    commit: str  # of the checkout whose oracles wrote it
    torch: str
    digest: str = ""  # sha256 of the fields above

    def signed(self) -> Entry:
        """Return the entry with its digest."""
        return Entry(**{**self._fields(), "digest": self.expected_digest()})

    def expected_digest(self) -> str:
        """Return what the digest of an entry must be that nobody has touched."""
        fields = asdict(self)
        del fields["digest"]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def folder() -> Path:
    """Return where the goldens are, in a checkout and in a wheel."""
    return Path(str(files("moe_conformance.goldens")))


def read_manifest(folder: Path) -> dict[str, Entry]:
    """Return the entries by chapter.

    Raises:
        MissingError: there is no manifest.
        AlteredError: it cannot be read, or an entry was changed by hand.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise MissingError(f"there is no {path}; write the goldens with `python -m moe_conformance.goldens.regenerate`")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = {chapter: _entry(fields) for chapter, fields in content.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise AlteredError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    for chapter, entry in entries.items():
        if entry.digest != entry.expected_digest():
            raise AlteredError(f"{chapter}: its entry in {MANIFEST} was changed by hand: the digest is of other fields")
    return entries


def write_manifest(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Write the entries, chapters in alphabetical order."""
    content = {chapter: asdict(entries[chapter]) for chapter in sorted(entries)}
    text = _INNERMOST.sub(lambda found: " ".join(found[0].split()), json.dumps(content, indent=1))
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read(folder: Path, chapter: str) -> dict[str, Tensor]:
    """Return the stored tensors of a chapter by name.

    Raises:
        MissingError: there is no entry or no file.
        TruncatedError: the file is shorter than it was written.
        AlteredError: the file or its entry is not as it was written.
    """
    entries = read_manifest(folder)
    if chapter not in entries:
        raise MissingError(f"{chapter}: {MANIFEST} has no such chapter; it has {', '.join(entries) or 'none'}")
    entry, path = entries[chapter], folder / f"{chapter}{SUFFIX}"
    if not path.is_file():
        raise MissingError(f"{chapter}: {path.name} is not there; restore it, or write it anew")
    data = path.read_bytes()
    if len(data) < entry.bytes:
        raise TruncatedError(f"{chapter}: {path.name} ends after {len(data)} of {entry.bytes} bytes; restore it")
    if (found := hashlib.sha256(data).hexdigest()) != entry.sha256:
        raise AlteredError(f"{chapter}: {path.name} has sha256 {found[:12]}..., not {entry.sha256[:12]}...; restore it")
    return parse(data)


def write(folder: Path, chapter: str, tensors: Mapping[str, Tensor], entry: Entry) -> Entry:
    """Write a chapter's file and return its entry with what the file is; the rest of the entry is as given."""
    data = save({name: tensor.contiguous() for name, tensor in sorted(tensors.items())})
    (folder / f"{chapter}{SUFFIX}").write_bytes(data)
    fields = {**entry._fields(), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return Entry(**{**fields, "tensors": {name: form_of(tensor) for name, tensor in sorted(tensors.items())}}).signed()


def form_of(tensor: Tensor) -> Form:
    """Return dtype and shape in the manifest's words."""
    return Form(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def check_folder(folder: Path, chapters: Sequence[str]) -> list[GoldenError]:
    """Return what is wrong with a folder as a whole: chapters without a golden, goldens without a chapter."""
    entries = read_manifest(folder)
    wrong: list[GoldenError] = [
        MissingError(
            f"{chapter}: there is no golden of it; write it with `python -m moe_conformance.goldens.regenerate`"
        )
        for chapter in chapters
        if chapter not in entries
    ]
    wrong += [
        UnusedError(f"{chapter}: nothing uses its golden; delete its entry, or say which chapter it is of")
        for chapter in entries
        if chapter not in chapters
    ]
    files = sorted(path.name for path in folder.glob(f"*{SUFFIX}"))
    wrong += [
        UnusedError(f"{name}: {MANIFEST} does not know this file; delete it")
        for name in files
        if name.removesuffix(SUFFIX) not in entries
    ]
    return wrong


def compare(chapter: str, name: str, stored: Tensor, actual: Tensor, allowed: Tensor | float) -> None:
    """Hold a value against the stored one, element by element.

    Args:
        chapter: For the message.
        name: Likewise.
        stored: The golden.
        actual: What was computed; of the same dtype and shape.
        allowed: The largest difference, of all elements or of each.

    Raises:
        DifferentError: dtype or shape differ, or an element by more than is allowed; NaN differs from all else. An
            infinity is equal to itself alone.
    """
    if form_of(stored) != form_of(actual):
        raise DifferentError(f"{chapter}: {name} is {_words(form_of(actual))}, the golden {_words(form_of(stored))}")
    if stored.is_floating_point():
        wrong = ~(((actual - stored).abs() <= allowed) | (actual == stored))
    else:
        wrong = actual != stored
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise DifferentError(
            f"{chapter}: {name}{list(at)} is {actual[at].item()!r}, the golden {stored[at].item()!r}; "
            f"{int(wrong.sum())} of {wrong.numel()} elements differ"
        )


def _entry(fields: Mapping[str, Any]) -> Entry:
    tensors = {name: Form(form["dtype"], tuple(form["shape"])) for name, form in fields["tensors"].items()}
    return Entry(**{**fields, "requirements": tuple(fields["requirements"]), "tensors": tensors})


def _words(form: Form) -> str:
    return f"{form.dtype} {list(form.shape)}"

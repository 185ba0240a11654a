"""Judges of resolved settings: refused, built as requested, or changed with a warning, as their rules allow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from moe_conformance.contract import Settings
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, fail, some
from moe_conformance.judging.observed.script import SLIPS, answers
from moe_conformance.judging.shared.overlapped.accepted import words_of
from moe_conformance.judging.verdict import Mismatch, NotOffered, Raised, Refused, Tally, Unrefused, WrongForm
from moe_conformance.reference.config_rules.outcomes import FACTS, lawful_build, outcomes
from moe_conformance.reference.config_rules.rules import Settings as Neutral
from moe_conformance.reference.config_rules.rules import broken
from moe_conformance.reference.config_rules.shown import hidden, lawful_refusal, unknown
from moe_conformance.scenarios.outcome import Answer, Outcome

_VERSIONS = "RULE-19"
_KNOWN: Mapping[str, tuple[object, ...]] = {
    "dispatcher": ("alltoall", "allgather", "fused"),
    "recompute": ("none", "full", "selective"),
    "recompute_method": (None, "uniform", "block"),
}
_NAMES: Mapping[str, tuple[str, ...]] = {  # options with several names, in any order
    "recompute_modules": ("moe", "layernorm"),
    "capture": ("attention", "router", "moe", "mlp"),
}
_DEFAULTS = {field.name: field.default for field in fields(Settings)}
_ASSUMED = ("versions", "extra")  # describe the environment, not what was built


_ERRORS: Mapping[str, type[Mismatch]] = {"built": Unrefused, "refused": Refused, "otherwise": Refused}


@dataclass(frozen=True)
class _Example:
    """One example of settings and the result of resolving it on every rank; `neutral` is the oracle's form of it."""

    requested: Settings
    neutral: Neutral
    answers: tuple[Answer, ...]

    @property
    def refusing(self) -> tuple[int, ...]:
        """The ranks that raised an error."""
        return tuple(rank for rank, answer in enumerate(self.answers) if answer.raised)

    @property
    def by_library(self) -> bool:
        """Whether the adapter attributes the refusal to a documented limit of the library."""
        return any(answer.error_by == "library" for answer in self.answers)

    @property
    def words(self) -> str:
        """The settings that differ from the defaults, as text."""
        return words_of(self.requested)

    def ran(self, rank: int) -> Settings:
        """Return the settings that were built on a rank."""
        return Settings(**self.answers[rank].values["settings"])

    def changed(self, rank: int) -> tuple[str, ...]:
        """Return the names of the options that have another value than requested on a rank."""
        ran, requested = self.ran(rank), _options(self.requested)
        return tuple(name for name, value in requested.items() if getattr(ran, name) != value)


def _of(settings: Settings, name: str) -> Any:
    value = getattr(settings, name)
    return tuple(sorted(value)) if name in _NAMES and value is not None else value


def judge_rule(outcome: Outcome, rule: str, tally: Tally) -> None:
    """Decide whether settings that break a rule are refused or changed as allowed, and valid ones are accepted.

    Settings that break several rules are judged by all of them, except where a limit on versions is not met: then by
    that limit only. Valid settings may be refused by a limit that the library documents.

    That settings which break the rule are accepted as they are, where the rule lets them be honoured, proves nothing:
    `judge_accepted` decides where they run.

    Raises:
        NotOffered: the adapter has no settings that break the rule, or some are accepted as they are, or all settings
            were refused.
        Unrefused: they were built on some ranks without an error.
        WrongForm: they were built with a change that the rule does not allow, or without a warning.
        Refused: valid settings were refused, or built otherwise than requested.
    """
    examples, reasons = _examples(outcome)
    usual = _usual_warnings(examples)
    findings: list[Finding] = []
    taken: list[str] = []  # what breaks the rule and is accepted as it is
    judged = accepted = 0
    for example in examples:
        rules = broken(example.neutral)
        if _VERSIONS in rules and rule != _VERSIONS:
            reasons.append(f"{example.words} needs other versions: {_limits(example.neutral)}")
            continue
        if rules and rule not in rules:
            continue
        judged += rule in rules
        if rule in rules and not example.refusing and not any(map(example.changed, range(len(example.answers)))):
            taken.append(f"{example.words} breaks {rule} and is accepted, which is judged where it runs, and not here")
        accepted += not example.refusing  # valid settings, or what stands openly in the place of invalid ones
        findings += _wrong_outcomes(example, rule, usual) if rules else _wrong_builds(example)
        for rank in range(len(example.answers)):
            tally.add(pairs=1, rank=rank)
    if findings:
        kinds = {finding.kind for finding in findings}
        fail(next((error for kind, error in _ERRORS.items() if kind in kinds), WrongForm), "run", findings)
    if taken:
        raise NotOffered(taken[0])
    if not judged:
        raise NotOffered(reasons[0] if reasons else f"nothing that breaks {rule} could be requested")
    if not accepted:
        raise NotOffered(f"nothing else is accepted than what breaks {rule}, so that a refusal proves nothing")


def judge_refusals(outcome: Outcome, tally: Tally) -> None:
    """Decide whether all refusals have a message, are the same on all ranks, and are not internal errors.

    Raises:
        NotOffered: nothing was refused.
        WrongForm: a refusal has no message, differs between ranks, or is an error such as AttributeError.
        Refused: some ranks refuse what others build.
    """
    examples, reasons = _examples(outcome)
    refused = [example for example in examples if example.refusing]
    for example in refused:
        errors = [(answer.error_type, answer.error) if answer.raised else None for answer in example.answers]
        _judge_no_slip(example)
        if not lawful_refusal(errors):
            _fail_refusal(example, errors)
        for rank in range(len(errors)):
            tally.add(pairs=1, rank=rank)
    if not refused:
        raise NotOffered(reasons[0] if reasons else "nothing was refused")


@judge(WrongForm, "run")
def judge_changes(outcome: Outcome) -> Comparisons:
    """Decide whether every option with another value than requested is warned about and equal on all ranks.

    Raises:
        NotOffered: nothing runs with another value.
        WrongForm: a change was not warned of, or ranks show different values.
    """
    examples, _ = _examples(outcome)
    usual = _usual_warnings(examples)
    changed = 0
    for example in examples:
        if example.refusing:
            continue
        numbers = [len(example.changed(rank)) for rank in range(len(example.answers))]
        changed += sum(numbers)
        yield Comparison(None, _lost(example, warned=_warned(example, usual)) if any(numbers) else "")
        for rank, number in enumerate(numbers):
            yield Comparison(rank, pairs=number)
    if not changed:
        raise NotOffered("no option runs with another value than requested")


@judge(WrongForm, "run")
def judge_shown(outcome: Outcome) -> Comparisons:
    """Decide whether valid settings are resolved to the requested ones, option by option.

    Raises:
        NotOffered: the adapter has no such settings.
        WrongForm: an option is lost, or differs between ranks.
    """
    examples, reasons = _examples(outcome)
    built = [example for example in examples if not example.refusing and not broken(example.neutral)]
    for example in built:
        yield Comparison(None, _lost(example, warned=None))
        for rank in range(len(example.answers)):
            yield Comparison(rank, elements=len(_DEFAULTS))
    if not built:
        raise NotOffered(reasons[0] if reasons else "no settings could be requested")


@judge(Unrefused, "run")
def judge_unknown(outcome: Outcome) -> Comparisons:
    """Decide whether unknown options and unknown values are refused.

    Raises:
        NotOffered: the adapter has no way to pass unknown ones.
        Unrefused: an unknown option or value was accepted.
    """
    examples, reasons = _examples(outcome)
    for example in examples:
        names = _unknown(example.requested)
        taking = tuple(rank for rank, answer in enumerate(example.answers) if not answer.raised)
        on = some([f"rank {rank}" for rank in taking])
        sentence = f"{example.words} is accepted on {on}; expected: an error, {', '.join(names)} is not known"
        yield Comparison(None, Finding("accepted", sentence, taking) if names and taking else "")
        for rank in range(len(example.answers)):
            yield Comparison(rank, pairs=1)
    if not examples:
        raise NotOffered(reasons[0] if reasons else "no unknown option could be requested")


def _unknown(settings: Settings) -> tuple[str, ...]:
    """Return the options, and the names in them, that must be refused."""
    named: dict[str, object] = {name: value for name, value in _options(settings).items() if name not in _NAMES}
    known: dict[str, Any] = {**dict.fromkeys(named), **_KNOWN}
    for option, names in _NAMES.items():
        parts = {f"{option} {name!r}": name for name in _of(settings, option) or ()}
        named, known = {**named, **parts}, {**known, **dict.fromkeys(parts, names)}
    return unknown({**named, **dict(settings.extra)}, known, defaults=_DEFAULTS)


def _examples(outcome: Outcome) -> tuple[list[_Example], list[str]]:
    """Return the examples that the adapter supports, and the reasons why it does not support others."""
    found: list[_Example] = []
    reasons: list[str] = []
    for number in range(0, len(outcome.workload.calls), 2):
        limits, resolved = answers(outcome, number), answers(outcome, number + 1)
        if adapters := [answer.error for answer in (*limits, *resolved) if answer.error_by == "adapter"]:
            reasons.append(adapters[0])
            continue
        if failed := next((answer for answer in limits if answer.raised), None):
            raise Raised("run", f"limits of settings raised {failed.error_type}: {failed.error}")
        given = [call["asked"] for call in outcome.workload.calls[number + 1].given]
        found.append(_Example(given[0], neutral(given, limits[0].values[""]), resolved))
    return found, reasons


def _judge_no_slip(example: _Example) -> None:
    """Require that no refusal is an internal error, such as a NameError."""
    for rank in example.refusing:
        answer = example.answers[rank]
        if answer.error_type in SLIPS:
            error = f"{answer.error_type}: {answer.error}"
            kind = f"resolve on rank {rank} raised an error of another kind than a refusal"
            raise WrongForm("run", f"{kind} for {example.words}: {error}", ranks=(rank,))


def _limits(neutral: Neutral) -> str:
    return ", ".join(f"{library} {needed}, found {found}" for library, needed, found in neutral.versions)


def neutral(given: Sequence[Settings], limits: Sequence[tuple[str, str, str | None]]) -> Neutral:
    """Return settings in the oracle's form; the ranks' settings may differ only in whether the kernel is present."""
    settings = given[0]
    options = {f.name: _of(settings, f.name) for f in fields(Neutral) if f.name not in FACTS}
    return Neutral(
        **{
            **options,
            "dtype": str(settings.dtype).removeprefix("torch."),
            "recompute_modules": frozenset(settings.recompute_modules),
            "capture": None if settings.capture is None else frozenset(settings.capture),
            "kernel_present": tuple(of_rank.kernel != "absent" for of_rank in given),
            "kernel_frees_input": settings.kernel == "freeing",
            "versions": tuple(tuple(limit) for limit in limits),
        }
    )


def _usual_warnings(examples: Sequence[_Example]) -> frozenset[str]:
    """Return the warnings that valid settings give."""
    warnings: set[str] = set()
    for example in examples:
        if not broken(example.neutral) and not example.refusing:
            for answer in example.answers:
                warnings.update(answer.values["warned"])
    return frozenset(warnings)


def _wrong_builds(example: _Example) -> Iterator[Finding]:
    """Yield findings for valid settings that are refused by no documented limit, or built with other values."""
    for rank, answer in enumerate(example.answers):
        start = f"{example.words} breaks no rule and"
        if answer.raised and not example.by_library:
            yield Finding("refused", f"{start} is refused on rank {rank}: {answer.error!r}", (rank,))
        elif not answer.raised and (changed := example.changed(rank)):
            yield Finding("otherwise", f"{start} runs on rank {rank} with {_changes(example, rank, changed)}", (rank,))


def _wrong_outcomes(example: _Example, rule: str, usual: frozenset[str]) -> Iterator[Finding]:
    """Yield findings for settings that break a rule and are built on some rank."""
    allowed = ", ".join(sorted(outcomes(example.neutral)))
    for rank, answer in enumerate(example.answers):
        if answer.raised:
            continue
        ran = neutral([example.ran(rank)], ())
        changed = example.changed(rank)
        start = f"{example.words} breaks {rule} and is built on rank {rank}"
        if not changed:
            if "honoured" not in outcomes(example.neutral):
                yield Finding("built", f"{start} without an error; allowed: {allowed}", (rank,))
        elif not lawful_build(example.neutral, ran):
            yield Finding("changed", f"{start} with {_changes(example, rank, changed)}; allowed: {allowed}", (rank,))
        elif not _warned(example, usual):
            yield Finding("silent", f"{start} with {_changes(example, rank, changed)} without a warning", (rank,))


def _lost(example: _Example, *, warned: bool | None) -> str:
    """Return which options are not resolved as requested, "" if all are; `warned` is None if changes are not legal."""
    resolved = [_options(example.ran(rank)) for rank in range(len(example.answers))]
    names = hidden(_options(example.requested), _options(Settings()), resolved, [bool(warned)] * len(resolved))
    by_rank = [f"{name} = {of[name]!r} on rank {rank}" for name in names for rank, of in enumerate(resolved)]
    without = "" if warned is None else " without a warning"
    return f"{example.words} is resolved{without} to {some(by_rank)}" if names else ""


def _fail_refusal(example: _Example, errors: Sequence[tuple[str, str] | None]) -> None:
    """Raise the mismatch of a wrong refusal."""
    building = [f"rank {rank}" for rank, error in enumerate(errors) if error is None]
    refusing = example.refusing
    error_type, error = example.answers[refusing[0]].error_type, example.answers[refusing[0]].error
    if building:
        words = f"is built on {some(building)} and refused on {some([f'rank {rank}' for rank in refusing])}: {error!r}"
        raise Refused("run", f"{example.words} {words}", ranks=refusing)
    if not error.strip():
        raise WrongForm("run", f"{example.words} is refused by {error_type} without a message", ranks=refusing)
    others = {(answer.error_type, answer.error) for answer in example.answers}
    words = " and ".join(f"{kind}: {text!r}" for kind, text in sorted(others))
    raise WrongForm("run", f"{example.words} is refused differently on its ranks: {words}", ranks=refusing)


def _warned(example: _Example, usual: frozenset[str]) -> bool:
    """Return whether a rank gave a warning that valid settings do not give."""
    return any({*answer.values["warned"]} - usual for answer in example.answers if not answer.raised)


def _changes(example: _Example, rank: int, names: Sequence[str]) -> str:
    ran = example.ran(rank)
    return ", ".join(f"{name} = {_of(ran, name)!r} instead of {_of(example.requested, name)!r}" for name in names)


def _options(settings: Settings) -> dict[str, Any]:
    return {name: _of(settings, name) for name in _DEFAULTS if name not in _ASSUMED}

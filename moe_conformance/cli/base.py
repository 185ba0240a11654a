"""Shared by the commands: their group, the error of a command that cannot run, options, and child processes."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import click

from moe_conformance.plugin import options

Command = TypeVar("Command", bound=Callable[..., Any])


class CannotRun(click.ClickException):
    """The command cannot run here; one sentence with the remedy."""

    exit_code = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="moe-conformance")
def main() -> None:
    """Drives an implementation of Mixture-of-Experts parallelism on real ranks and judges what it did."""


def require_torch() -> None:
    """Raise CannotRun if torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise CannotRun("torch is not installed here; install the build that this machine needs, 2.6 or newer")


def with_options(names: Collection[str]) -> Callable[[Command], Command]:
    """Return a decorator that adds the named options of a run to a command."""

    def decorate(command: Command) -> Command:
        for option in reversed([option for option in options.OPTIONS if option.name in names]):
            keywords: dict[str, Any] = {"metavar": option.metavar, "multiple": option.lists, "callback": _joined}
            if option.flag:
                keywords = {"is_flag": True, "default": None}
            decorator = click.option(f"--{option.name}", help=option.help, **keywords)
            command = decorator(command)
        return command

    return decorate


def _joined(context: click.Context, parameter: click.Parameter, value: str | tuple[str, ...] | None) -> str | None:
    """Return the values of an option that may be given several times, joined by commas."""
    return (",".join(value) or None) if isinstance(value, tuple) else value


def as_arguments(prefix: str, chosen: Mapping[str, str | bool]) -> Iterator[str]:
    """Yield the chosen options as arguments; a flag has no value."""
    for name, value in chosen.items():
        argument = f"{prefix}{name.replace('_', '-')}"
        yield argument if value is True else f"{argument}={value}"


def child(command: list[str]) -> int:
    """Run a command and forward SIGTERM to it; Ctrl-C reaches it from the terminal. Return its exit status."""
    child = subprocess.Popen(command)
    before = signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(number))
    try:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


class Terminal:
    """The terminal to which the summary of a run is written outside of pytest."""

    def __init__(self, width: int) -> None:
        self._width = width

    def write_line(self, line: str, **markup: bool) -> None:
        """Write a line."""
        click.secho(line, fg="red" if markup.get("red") else None)

    def write_sep(self, sep: str, title: str | None = None, fullwidth: int | None = None, **markup: bool) -> None:
        """Write a title in a rule."""
        self.write_line(f" {title} ".center(fullwidth or self._width, sep), **markup)

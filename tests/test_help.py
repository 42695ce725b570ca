"""`--help` of every command explains each argument, names each default and shows an example."""

from __future__ import annotations

import argparse
import importlib
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "tools").exists(), reason="tests are run from outside the checkout")
SCRIPTS = sorted(
    f"{folder}.{path.stem}"
    for folder in ("tools", "benchmarks", "examples")
    for path in (ROOT / folder).glob("*.py")
    if "ArgumentParser(" in path.read_text()
)
COMMANDS = ("train", "evaluate", "report")


class Parsed(Exception):
    """Carries the parser that a command was about to use."""


def parser_of(command: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    def stop(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise Parsed(self)

    for name in ("parse_args", "parse_intermixed_args", "parse_known_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, stop)
    with pytest.raises(Parsed) as caught:
        command()
    parser = caught.value.args[0]
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def with_subcommands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


def gaps(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Arguments without a help text, or with a default that it does not name."""
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        name = action.option_strings[-1] if action.option_strings else action.dest
        text = action.help or ""
        if not text:
            yield f"{name}: no help"
        has_default = bool(action.default) and action.default not in (math.inf, argparse.SUPPRESS) and action.nargs != 0
        if has_default and "default" not in text:
            yield f"{name}: its default, {action.default!r}, is not named"


def assert_complete(parser: argparse.ArgumentParser) -> None:
    for one in with_subcommands(parser):
        text = one.format_help()  # fails at a % that argparse takes for a format
        assert not [*gaps(one)], one.prog
        examples = f"{one.description}\n{one.epilog}"
        assert re.search(r"^ *(python |grpo |make |compute-sanitizer )", examples, re.MULTILINE), (
            f"{one.prog}: no example"
        )
        assert text.startswith("usage:")


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_explain_their_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")  # as for a script that is run by its path
    module = importlib.import_module(name)
    assert_complete(parser_of(module.main, monkeypatch))


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_explain_their_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = pytest.importorskip("grpo_trainer.cli")
    assert_complete(parser_of(lambda: getattr(cli, name)(["x"]), monkeypatch))

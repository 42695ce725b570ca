"""Parsers of the commands' arguments, whose errors name what was probably meant."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose error about an unknown option names the nearest one, or says how to set a recipe's key."""

    commands: Any = None

    def add_subparsers(self, **kwargs: Any) -> Any:
        self.commands = super().add_subparsers(**kwargs)
        return self.commands

    def error(self, message: str) -> NoReturn:
        from grpo_trainer.settings import nearest

        _, mark, unknown = message.partition("unrecognized arguments: ")
        if mark:
            parsers = [self, *(self.commands.choices.values() if self.commands else ())]
            options = {option: parser.prog for parser in parsers for option in parser._option_string_actions}
            option = unknown.split()[0]
            of_another = f"; it belongs to {options[option]}" if option in options else None
            message += of_another or self._as_key(option) or nearest(option, sorted(options))
        super().error(message)

    def _as_key(self, option: str) -> str | None:
        """The way to set a key of the recipe that was written as an option."""
        from grpo_trainer.recipe import Recipe

        key = option.lstrip("-").partition("=")[0]
        takes_keys = any("KEY=VALUE" in str(action.metavar) for action in self._actions)
        is_key = key.partition(".")[0] in {field.name for field in dataclasses.fields(Recipe)}
        return f"; a key of the recipe is set without dashes: {key}=VALUE" if takes_keys and is_key else None


def make_parser(name: str, description: str, examples: str, commands: Any = None) -> argparse.ArgumentParser:
    """A parser, or that of a command among others, whose help ends with examples."""
    kwargs: dict[str, Any] = {
        "epilog": examples.strip(),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,  # a misspelt option is an error
    }
    if commands is None:
        return Parser(name, description=description, **kwargs)
    sentence = f"{description[0].upper()}{description[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(name, help=description, description=sentence, **kwargs)
    return parser

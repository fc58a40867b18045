"""Every `loraplex …` of the documents is one that the command line takes: commands, options and arguments. None runs.

In blocks of commands a line must be whole; in running text arguments may be left out, and NAME stands for a name.
"""

import re
import shlex
from collections.abc import Iterator
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from inference_service.config import InferenceConfig
from loraplex.cli.main import app
from registry_service.__main__ import _parse as parse_registry
from shared.flags import flag_parser

ROOT = Path(__file__).parents[2]
# What LOG.md tells of days that are over need not run today.
DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")} - {ROOT / "docs" / "LOG.md"})
BLOCK = re.compile(r"^[ ]*```(\w*)\n(.*?)^[ ]*```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`(loraplex\s[^`]+)`")
SHELLS = ("", "console", "bash", "sh", "shell")
PROGRAMS = ("loraplex", ".venv/bin/loraplex")
SERVERS = ("registry", "serve")


class Command(NamedTuple):
    """The words after `loraplex`. `is_whole`: it can be typed as it is written."""

    words: tuple[str, ...]
    is_whole: bool


def commands(text: str) -> Iterator[Command]:
    """Those of a document's blocks of commands, and those in backticks in its running text."""
    for language, block in BLOCK.findall(text):
        if language in SHELLS:
            for line in block.replace("\\\n", " ").splitlines():
                yield from (Command(words, True) for words in _programs(line))
    for span in SPAN.findall(BLOCK.sub("", text)):
        yield from (Command(words, False) for words in _programs(" ".join(span.split())))


def _programs(line: str) -> Iterator[tuple[str, ...]]:
    """The words of each `loraplex` that a line of a shell runs, without what is redirected and piped."""
    if not any(program in line for program in PROGRAMS):
        return
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    running: list[str] = []
    for word in [*lexer, ";"]:
        if not set(word) <= set("();<>|&"):
            running.append(word)
            continue
        if running and running[0] in PROGRAMS:
            yield tuple(running[1:])
        running = []


def parse(command: Command) -> dict[str, Any]:
    """What the command would be called with; nothing for a server.

    Raises:
        typer.TyperException: what the command line says of it.
        SystemExit: a server's flags are wrong.
    """
    called: dict[str, Any] = {}
    words = [word.lower() if word.isupper() and not command.is_whole else word for word in command.words]
    root = typer.main.get_command(app)
    for name, leaf in _leaves(root):
        leaf.callback = partial(_parse_server, name, words) if name in SERVERS else lambda **given: called.update(given)
    try:
        copy_context().run(root.main, words, "loraplex", standalone_mode=False)  # who calls is remembered in a context
    except typer.TyperException as error:
        if command.is_whole or not error.format_message().startswith("Missing "):
            raise
    return called


def _leaves(group: Any) -> Iterator[tuple[str, Any]]:
    for name, each in group.commands.items():
        if hasattr(each, "commands"):
            yield from _leaves(each)
        else:
            yield name, each


def _parse_server(name: str, words: list[str], **_: Any) -> None:
    """By the server's own parser. Raises SystemExit if that refuses them."""
    arguments = [word for word in words[words.index(name) + 1 :] if word != "--help"]
    if name == "registry":
        parse_registry(arguments)
    else:
        flag_parser(InferenceConfig, "loraplex serve", "").parse_args(arguments)


def _each() -> Iterator[Any]:
    for document in DOCUMENTS:
        for command in dict.fromkeys(commands(document.read_text())):
            yield pytest.param(command, id=f"{document.name}: {' '.join(command.words)}")


@pytest.mark.parametrize("command", list(_each()))
def test_the_command_line_takes_it(command: Command) -> None:
    called = parse(command)
    if "--ca" in command.words and command.is_whole:
        addresses = [str(called.get(option, "")) for option in ("registry", "server")]
        assert not any("localhost" in address for address in addresses), "a name that is in no certificate"


@pytest.mark.parametrize(
    "line",
    [
        "loraplex adapter lst",
        "loraplex --registry localhost:50051 adapter list",
        "loraplex adapter show # whose?",
        "make demo && loraplex adapter list --no-such > list.txt",
        "loraplex registry migrate --listen localhost:50051",
        "loraplex serve --no-such 1 &",
        ".venv/bin/loraplex registry \\\n    --no-such 1",
    ],
)
def test_what_it_does_not_take_is_found(line: str) -> None:
    (command,) = commands(f"```console\n{line}\n```\n")
    with pytest.raises((typer.TyperException, SystemExit)):
        parse(command)


def test_commands_of_others_are_none_of_ours() -> None:
    text = (
        "```console\nkubectl -n loraplex get pods\n```\n```python\nloraplex = 1\n```\n`loraplex.Client`, `loraplex`\n"
    )
    assert list(commands(text)) == []

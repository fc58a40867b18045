"""What a Dockerfile says, as far as checks need it: its stages' instructions, and the last one's variables."""

import json
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Dockerfile:
    """`stages`: of each, its instructions in order as (keyword, rest). `arguments`: ARGs before the first stage."""

    arguments: dict[str, str]
    stages: tuple[tuple[tuple[str, str], ...], ...]

    @classmethod
    def read(cls, path: Path) -> "Dockerfile":
        """Raises ValueError for a line that is no instruction."""
        text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
        arguments: dict[str, str] = {}
        stages: list[list[tuple[str, str]]] = []
        for line in re.sub(r"\\\n\s*", "", text).splitlines():
            if not line.strip():
                continue
            keyword, _, rest = line.strip().partition(" ")
            if not keyword.isupper():
                raise ValueError(f"{path.name}: {line!r:.60} is no instruction")
            if keyword == "FROM":
                stages.append([])
            if stages:
                stages[-1].append((keyword, rest.strip()))
            else:
                name, _, value = rest.partition("=")
                arguments[name.strip()] = value.strip()
        return cls(arguments, tuple(tuple(stage) for stage in stages))

    def all(self, keyword: str, stage: int = -1) -> list[str]:
        """The rests of all such instructions of a stage."""
        return [rest for word, rest in self.stages[stage] if word == keyword]

    def command(self, keyword: str) -> list[str]:
        """The last ENTRYPOINT or CMD, which must be a JSON array."""
        return [str(word) for word in json.loads(self.all(keyword)[-1])]

    @cached_property
    def environment(self) -> dict[str, str]:
        """The variables of the last stage, as written."""
        words = [word for rest in self.all("ENV") for word in shlex.split(rest)]
        return dict(word.split("=", 1) for word in words)

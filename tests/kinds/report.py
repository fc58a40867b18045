"""What the tests of this folder measured, as JSON for the table in README."""

import json
from dataclasses import dataclass, field
from pathlib import Path

PATH = Path(__file__).resolve().parents[2] / "build" / "kinds.json"


@dataclass
class Report:
    """Entries are kind, base model, case and the worst difference of a log-probability."""

    entries: list[dict[str, object]] = field(default_factory=list)

    def add(self, kind: str, base: str, case: str, worst: float) -> None:
        self.entries.append({"kind": kind, "base": base, "case": case, "worst": worst})

    def write(self) -> None:
        PATH.parent.mkdir(exist_ok=True)
        PATH.write_text(json.dumps(self.entries, indent=1))

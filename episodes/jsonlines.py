"""A log that a killed program leaves usable."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class JsonLines:
    """A log of results, one JSON object a line, that a kill at any byte leaves usable.

    What stands after the last newline is a line that a kill cut short. It is not read, and it is
    cut off before the next line is written, which would otherwise be joined to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._clean = False  # until the first append

    def read(self) -> list[dict[str, Any]]:
        """The whole lines, the oldest first; none when there is no file.

        Raises:
            json.JSONDecodeError: a whole line is not JSON.
        """
        if not self.path.exists():
            return []
        whole, _, _ = self.path.read_bytes().rpartition(b"\n")
        return [json.loads(line) for line in whole.splitlines()]

    def append(self, row: dict[str, Any]) -> None:
        """Write one line; it is with the operating system when this returns."""
        line = json.dumps(row).encode() + b"\n"
        if not self._clean:
            self._cut_torn_line()
        with self.path.open("ab") as file:
            file.write(line)

    def _cut_torn_line(self) -> None:
        if self.path.exists():
            before = self.path.read_bytes()
            if not before.endswith(b"\n"):
                os.truncate(self.path, before.rfind(b"\n") + 1)
        self._clean = True

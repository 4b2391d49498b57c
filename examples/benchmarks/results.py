"""Where benchmark rows go: a CSV that grows, each row with all that is needed to repeat it."""

import csv
from pathlib import Path
from typing import Any


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows of equal keys; the first writes the header."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        if new:
            writer.writeheader()
        writer.writerows(rows)

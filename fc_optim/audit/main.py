"""The entry point of `fc-audit`, which says what to install where the extra is missing."""

import importlib.util
import sys


def main() -> None:
    """Run the command line of `fc_optim.audit.cli`."""
    missing = [m for m in ("typer", "rich") if importlib.util.find_spec(m) is None]
    if missing:
        sys.exit(f"fc-audit needs {', '.join(missing)}: pip install 'fc_optim[audit]'")
    from fc_optim.audit.cli import app

    app(prog_name="fc-audit")

"""One line that says what to install, where a framework is missing or too old."""

import contextlib
import sys
from collections.abc import Iterator

from torch.torch_version import TorchVersion


@contextlib.contextmanager
def needs(package: str, minimum: str) -> Iterator[None]:
    """Around the imports of a framework. Raises ImportError if it is not there, or older.

    Args:
        package: as it is imported, and installed.
        minimum: the oldest version that the integration is tested with.
    """
    wanted = f"{package} >= {minimum} is needed here; pip install '{package}>={minimum}'"
    try:
        yield
    except ImportError as e:
        found = _version(package)
        state = f"{found} is installed" if found else "it is not installed"
        raise ImportError(f"{wanted} ({state}: {e}).", name=package) from e
    found = _version(package)
    if found is not None and TorchVersion(found) < minimum:
        raise ImportError(f"{wanted} ({found} is installed).", name=package)


def _version(package: str) -> str | None:
    """Of what was imported: a distribution may have another name."""
    return getattr(sys.modules.get(package), "__version__", None)

"""Benches that lie with the tests: they import services, which no installed package may.

Must not know: what they measure. Entry point: `load_from_checkout`.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import octavo
from octavo.errors import ConfigurationError


def load_from_checkout(module: str, what: str) -> Any:
    """`tests.bench.<module>`. Raises ConfigurationError, naming `what`, outside a checkout."""
    for root in (Path(octavo.__file__).parents[2], Path.cwd()):
        if (root / "tests" / "bench" / module.partition(".")[0]).is_dir():
            if str(root) not in sys.path:
                sys.path.insert(0, str(root))
            return importlib.import_module(f"tests.bench.{module}")
    raise ConfigurationError(
        f"{what} in tests/bench of Octavo's source tree: run this in a checkout"
    )

"""The console script `octavo`: serve, bench, and the services themselves.

Read first: `main` (which command is where), then `serve` and `stack`. Must not import any
service: they are loaded by name, so that each runs with its own dependencies only.
"""

from octavo.cli.main import main

__all__ = ["main"]

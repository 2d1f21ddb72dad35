"""The router stays light: no torch, no transformers, no other service."""

import subprocess
import sys

PROGRAM = """
import sys
import octavo_router.__main__
import octavo_router.wiring
heavy = {"torch", "transformers", "triton", "octavo_worker", "octavo_scheduler", "octavo_kernels"}
print(sorted(heavy & set(sys.modules)))
"""


def test_heavy_modules_are_not_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"

"""Write the reference pages, or with --check say whether they are what the code says.

python -m tests.reference [--check]
"""

import argparse
import asyncio
import difflib
import sys
from pathlib import Path
from typing import Any

from tests.fakes.router_process import byte_scheduler, running_router
from tests.reference import metrics_page, openapi_page, protos_page, rule_manifest

_ROOT = Path(__file__).parents[2]
_RULES = _ROOT / "k8s/components/observability"


def main() -> int:
    """0 if the pages are right now."""
    parser = argparse.ArgumentParser(prog="python -m tests.reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    is_check = parser.parse_args().check
    pages = {
        _ROOT / "router/API.md": openapi_page.write_page(asyncio.run(_openapi())),
        _ROOT / "k8s/METRICS.md": metrics_page.write_page(),
        _RULES / "rule.yaml": rule_manifest.write_manifest(
            (_RULES / "rules/octavo.yaml").read_text(encoding="utf-8")
        ),
        _ROOT / "protos/API.md": protos_page.write_page(
            protos_page.compile_protos(_ROOT / "protos")
        ),
    }
    is_right = True
    for path, text in pages.items():
        if not is_check:
            path.write_text(text, encoding="utf-8")
            continue
        there = path.read_text(encoding="utf-8") if path.is_file() else ""
        name = str(path.relative_to(_ROOT))
        lines = there.splitlines(True), text.splitlines(True)
        difference = list(difflib.unified_diff(*lines, name, "as the code says", n=1))
        if difference:
            is_right = False
            sys.stdout.writelines(difference)
    if not is_right:
        print("pages differ from the code: run 'make docs'", file=sys.stderr)
    return 0 if is_right else 1


async def _openapi() -> dict[str, Any]:
    """The document of a real router."""
    async with running_router(byte_scheduler()) as router:
        return (await router.http.get("/openapi.json")).json()


if __name__ == "__main__":
    sys.exit(main())

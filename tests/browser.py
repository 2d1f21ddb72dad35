"""Debian's Chromium without a screen, driven through the DevTools protocol.

Playwright's own browsers aren't used. While a browser runs, its thread has a running event loop:
tests beside it must not call asyncio.run. Entry points: `chromium`, `Visit`.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from tests.programs import find_program

# Generous: everything waits for a state, and a loaded machine is slow.
TIMEOUT_MS = 60_000
_FLAGS = ("--disable-dev-shm-usage", "--disable-gpu")


@contextmanager
def chromium() -> Generator[Browser]:
    """A browser; skips the test without Chromium."""
    program = find_program("chromium", "chromium")
    # Chromium has no sandbox for root.
    flags = [*_FLAGS, *(["--no-sandbox"] if os.getuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """One page in a context of its own: nothing is stored from before.

    `problems`: what the browser complained of: script errors, console warnings, policy breaches.
    """

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, **options}
        )
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.problems: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.goto(url)

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def close(self) -> None:
        self.context.close()

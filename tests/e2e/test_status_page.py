"""The status page in a real browser, on real services: what people see, and that it lives."""

import json
import threading
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.browser import TIMEOUT_MS, Visit, chromium
from tests.e2e.stack import Service, Stack

KEY = "k1"
expect.set_options(timeout=TIMEOUT_MS)
SIZES = [(1280, 900), (768, 900), (390, 844)]


@pytest.fixture(scope="module")
def stack(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two workers with few blocks, behind a key."""
    with Stack(
        tmp_path_factory.mktemp("status-page"),
        model=tiny_folder,
        num_workers=2,
        worker_flags=("--num-kv-blocks", "400"),
        environ={"OCTAVO_API_KEYS": f"{KEY}:alice"},
    ) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@contextmanager
def visiting(
    browser: Browser, stack: Stack, *, key: str = KEY, expected: str = "", **options: Any
) -> Generator[Page]:
    """The page, opened with the key; in the end nothing went wrong in it but `expected`."""
    visit = Visit(browser, f"{stack.url}/ui", **options)
    try:
        if key:
            visit.page.get_by_label("Key", exact=True).fill(key)
            visit.page.get_by_role("button", name="Open").click()
            expect(visit.page.locator("#state")).to_have_text("live")
            expect(worker(visit.page, "worker-0")).to_contain_text("running")
        yield visit.page
        # The browser reports the 401 that made the page ask for a key.
        problems = [
            p for p in visit.problems if "401" not in p and not (expected and expected in p)
        ]
        assert problems == []
    finally:
        visit.close()


def worker(page: Page, name: str) -> Any:
    return page.locator("section.worker").filter(has_text=name)


@contextmanager
def load(stack: Stack, num_requests: int, max_tokens: int) -> Generator[None]:
    """Greedy requests that share a beginning, all at once; they end before the block does."""

    def ask(number: int) -> None:
        body = {
            "prompt": "the cat sat on the mat and the rain in Spain " * 6 + str(number % 4),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{stack.url}/v1/completions",
            json.dumps(body).encode(),
            {
                "Authorization": f"Bearer {KEY}",
                "Content-Type": "application/json",
                "X-Request-Id": f"load-{number}",
            },
        )
        with urllib.request.urlopen(request) as answer:
            answer.read()

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(num_requests)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def changed_chat(page: Page, **fields: Any) -> list[dict[str, Any]]:
    """From now on chat requests have these fields too; what the page sent itself."""
    sent: list[dict[str, Any]] = []

    def change(route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        sent.append(body)
        route.continue_(post_data=json.dumps({**body, **fields}))

    page.route("**/v1/chat/completions", change)
    return sent


def say(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def has_colour(page: Page, colour: str) -> Callable[[], bool]:
    """Whether any block map has a pixel of the named colour."""
    script = """name => {
        const probe = new OffscreenCanvas(1, 1).getContext("2d");
        const style = getComputedStyle(document.documentElement);
        probe.fillStyle = style.getPropertyValue("--" + name);
        probe.fillRect(0, 0, 1, 1);
        const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
        return [...document.querySelectorAll(".map canvas")].some(canvas => {
            if (!canvas.width || !canvas.height) return false;
            const copy = new OffscreenCanvas(canvas.width, canvas.height);
            const context = copy.getContext("2d", { willReadFrequently: true });
            context.drawImage(canvas, 0, 0);
            const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
            for (let i = 0; i < data.length; i += 4)
                if (data[i] === r && data[i + 1] === g && data[i + 2] === b) return true;
            return false;
        });
    }"""
    return lambda: bool(page.evaluate(script, colour))


def until(page: Page, condition: Callable[[], bool]) -> None:
    """Wait for a state that no locator can tell."""
    for _ in range(TIMEOUT_MS // 100):
        if condition():
            return
        page.wait_for_timeout(100)
    raise AssertionError("it didn't come")


def test_it_asks_for_the_key_and_keeps_it_for_the_tab(browser: Browser, stack: Stack) -> None:
    with visiting(browser, stack, key="") as page:
        expect(page.get_by_label("Key", exact=True)).to_be_focused()
        expect(page.locator("#board")).to_be_hidden()
        expect(page.locator("#state")).to_have_text("key needed")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("That key is not known here.")
        expect(page.locator("#board")).to_be_hidden()
        page.get_by_label("Key", exact=True).fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("live")
        expect(page.locator("#board")).to_be_visible()
        expect(page.locator("#locked")).to_be_hidden()
        page.reload()
        expect(page.locator("#state")).to_have_text("live")
        assert page.evaluate("localStorage.length") == 0
        page.get_by_role("button", name="Forget key").click()
        expect(page.locator("#locked")).to_be_visible()
        expect(page.locator("#board")).to_be_hidden()
        assert page.evaluate("sessionStorage.length") == 0


def test_it_shows_load_while_it_happens(browser: Browser, stack: Stack) -> None:
    with visiting(browser, stack) as page:
        expect(page.get_by_role("heading", name="worker-1")).to_be_visible()
        assert not has_colour(page, "used")()
        charts = page.locator("figure")
        # From before the load: a slow browser may first look when its steps are over.
        step = worker(page, "worker-0").locator("dd").nth(4)
        before = step.inner_text()
        with load(stack, 10, 1200):
            expect(charts.filter(has_text="Requests").locator(".blue strong")).not_to_have_text("0")
            until(page, has_colour(page, "used"))
            until(page, has_colour(page, "shared"))
            tokens = charts.filter(has_text="Tokens/s").locator(".blue strong")
            expect(tokens).not_to_have_text("0")
            rows = page.locator("#requests tr").filter(has_text="load-")
            expect(rows.filter(has_text="decode").first).to_be_visible()
            expect(step).not_to_have_text(before)
        expect(rows.filter(has_text="length")).to_have_count(10)
        expect(rows.filter(has_text="cached prefix").first).to_be_visible()
        expect(rows.locator("td:nth-child(7)").first).to_have_text("1,200")
        expect(tokens).to_have_text("0")
        until(page, has_colour(page, "cached"))
        until(page, lambda: not has_colour(page, "used")())
        path = charts.filter(has_text="Tokens/s").locator("path.line.blue").get_attribute("d")
        assert path is not None
        heights = {point.split(" ")[1] for point in path.strip("M").split("L")}
        assert len(heights) > 1, "the line is flat"


def test_a_chat_streams_remembers_and_finds_its_request(browser: Browser, stack: Stack) -> None:
    with visiting(browser, stack) as page:
        sent = changed_chat(page, temperature=0, ignore_eos=True, max_tokens=40)
        say(page, "hello <b>world</b>")
        notes = page.locator("#chat-log .note")
        expect(notes.first).to_contain_text("40 tokens")
        expect(notes.first).to_contain_text("first after")
        bubbles = page.locator(".bubble")
        expect(bubbles.nth(0)).to_have_text("hello <b>world</b>")
        expect(bubbles.nth(1)).not_to_have_text("")
        mine = page.locator("#requests tr.mine")
        expect(mine).to_have_count(1)
        expect(mine).to_contain_text("length")
        page.get_by_label("Message").fill("and then?")
        page.keyboard.press("Enter")
        expect(notes).to_have_count(2)
        roles = [message["role"] for message in sent[1]["messages"]]
        assert roles == ["user", "assistant", "user"]
        assert sent[1]["messages"][1]["content"] == bubbles.nth(1).text_content()
        page.get_by_role("button", name="Clear").click()
        expect(bubbles).to_have_count(0)


def test_a_chat_is_stopped_on_the_worker_too(browser: Browser, stack: Stack) -> None:
    with visiting(browser, stack) as page:
        changed_chat(page, temperature=0, ignore_eos=True, max_tokens=1900)
        say(page, "tell me everything")
        expect(page.locator(".bubble.assistant")).not_to_have_text("")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#chat-log .note")).to_contain_text("stopped")
        expect(page.locator("#requests tr.mine")).to_contain_text("cancelled")
        expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_refusal_is_told_and_the_question_taken_back(browser: Browser, stack: Stack) -> None:
    with visiting(browser, stack, expected="400") as page:
        sent = changed_chat(page, max_tokens=100_000)
        say(page, "hello")
        expect(page.locator("#chat-log .problem")).to_contain_text("max_tokens")
        page.unroute("**/v1/chat/completions")
        sent = changed_chat(page, temperature=0, ignore_eos=True, max_tokens=5)
        say(page, "again")
        expect(page.locator("#chat-log .note").nth(1)).to_contain_text("5 tokens")
        assert [message["content"] for message in sent[0]["messages"]] == ["again"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_it_fits_and_can_be_used_without_a_mouse(
    browser: Browser, stack: Stack, width: int, height: int, scheme: str
) -> None:
    options = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
    with visiting(browser, stack, **options) as page:
        assert page.evaluate("document.scrollingElement.scrollWidth") == width
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, light[4:-1].split(","))) > 3 * 128) == (scheme == "light")
        # Everything that can be used has a name and is reached by Tab.
        unnamed = page.evaluate(
            """() => [...document.querySelectorAll("button, input, textarea, select")].filter(
                e => e.checkVisibility() && !e.labels?.length && !e.textContent.trim()
            ).length"""
        )
        assert unnamed == 0
        reached: set[str] = set()
        for _ in range(12):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id"))
        assert {"forget-key", "chat-log", "chat-input", "chat-send", "chat-clear"} <= reached


def test_nothing_that_is_told_becomes_markup(browser: Browser, stack: Stack) -> None:
    evil = "<img src=x onerror=alert(1)>"
    with visiting(browser, stack) as page:
        picture = page.evaluate(
            """async key => {
                const headers = { Authorization: "Bearer " + key };
                const answer = await fetch("ui/feed", { headers });
                const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
                let text = "";
                const cell = /event: cell\\ndata: (.*)\\n\\n/;
                while (!cell.test(text)) text += (await reader.read()).value;
                reader.cancel();
                return JSON.parse(text.match(cell)[1]);
            }""",
            KEY,
        )
        picture["scheduler_id"] = picture["picture"]["workers"][0]["worker_id"] = evil
        picture["picture"]["workers"][1].update(phase=evil, address=evil)
        picture["picture"]["outcomes"] = {evil: 1}
        request = {"request_id": evil, "why": evil, "phase": evil, "worker_id": evil}
        picture["picture"]["requests"] = [{**request, "serial": 1, "index": 0, "age_s": 1}]
        router = {"models": [evil, evil], "router_id": evil, "version": evil}
        events = (("router", router), ("cell", picture))
        body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
        page.route(
            "**/ui/feed", lambda route: route.fulfill(body=body, content_type="text/event-stream")
        )
        page.reload()
        expect(page.locator("h3")).to_have_text(evil)
        expect(page.locator("#requests td").first).to_have_text(evil)
        assert page.locator("main img").count() == 0


def test_a_killed_worker_is_shown_as_gone_and_the_page_comes_back_by_itself(
    browser: Browser, stack: Stack
) -> None:
    """The last test of this stack: it breaks it."""
    with visiting(browser, stack, expected="Failed to load resource") as page:
        with load(stack, 8, 1000):
            expect(page.locator("#requests tr").filter(has_text="decode").first).to_be_visible()
            stack.workers[1].kill()
            gone = worker(page, "worker-1")
            expect(gone).to_contain_text("gone")
            expect(gone.locator("canvas")).to_be_hidden()
        expect(page.locator(".cell")).to_contain_text("its stream broke")
        expect(worker(page, "worker-0")).to_contain_text("running")
        restart_router(page, stack)
        expect(page.locator("#state")).to_have_text("live")
        expect(worker(page, "worker-0")).to_contain_text("running")
        stack.schedulers[0].kill()
        expect(page.locator(".cell .pill").first).to_have_text("not connected")


def restart_router(page: Page, stack: Stack) -> None:
    """A router that drains ends its viewers' streams; the next one has the same address."""
    old = stack.routers[0]
    port = old.ports["port"]
    assert old.stop() == 0
    expect(page.locator("#state")).to_have_text("reconnecting")
    schedulers = ",".join(scheduler.address for scheduler in stack.schedulers)
    new: Service = stack.spawn(
        *("router", "--model", stack.model, "--schedulers", schedulers),
        *("--grpc-port", "0", "--port", str(port)),
    )
    new.wait_ready()
    stack.routers[0] = new

"""The page of a server in headless Chromium."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.scripted import Running, ScriptedModel

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
THINK_END = "<|close|>think<|sep|><|open|>response<|sep|>"


@contextmanager
def running_chromium() -> Iterator[Any]:
    """Playwright's browser. Skips the test where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    # Its sandbox can't be had by root, as whom containers run.
    arguments = ["--no-sandbox"] if os.getuid() == 0 else []
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


@dataclass
class Visit:
    """A page as one visitor sees it, with what it asked for and complained about."""

    url: str
    page: Any
    refusals_expected: bool = False  # the console tells of every answer that is an error
    requests: list[Any] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def ask(self, text: str, *, wait: bool = True) -> None:
        self.page.fill("#question", text)
        self.page.press("#question", "Enter")
        if wait:
            self.wait_for_answer()

    def wait_for_answer(self) -> None:
        self.page.wait_for_selector("#send:visible")
        assert self.page.locator(".turn").last.get_attribute("aria-busy") == "false"

    def show(self, view: str) -> None:
        self.page.click(f"nav [data-shows={view}]")

    def set(self, **settings: str) -> None:
        self.show("settings")
        for name, value in settings.items():
            control = self.page.locator(f"#{name}")
            control.select_option(value) if name in ("format", "effort") else control.fill(value)

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()

    def bodies(self) -> list[dict[str, Any]]:
        """What was sent to the chat route."""
        return [r.post_data_json for r in self.requests if r.url.endswith("/v1/chat/completions")]

    def module(self, name: str, code: str, given: Any = None) -> Any:
        """What `code` returns, with a module of the page as `it`."""
        load = f"const it = await import('/page/{name}.js');"
        return self.page.evaluate(f"async (given) => {{ {load} {code} }}", given)

    def check(self) -> None:
        """Nothing was loaded from elsewhere, nothing was wrong."""
        elsewhere = [r.url for r in self.requests if not r.url.startswith((self.url, f"blob:{self.url}"))]
        assert elsewhere == []
        told = "the server responded with a status"
        assert [line for line in self.complaints if not (self.refusals_expected and told in line)] == []


def visited(server: Running, browser: Any, **options: Any) -> Visit:
    """A new visitor's page, wide enough for two views."""
    page = browser.new_context(**({"viewport": {"width": 1280, "height": 800}} | options)).new_page()
    page.set_default_timeout(20_000)
    visit = Visit(server.url, page)
    page.on("request", lambda request: visit.requests.append(request))
    page.on("pageerror", lambda error: visit.complaints.append(str(error)))
    page.on("console", lambda line: line.type in ("error", "warning") and visit.complaints.append(line.text))
    page.goto(server.url)
    return visit


class Steps:
    """The model makes as many steps as it is allowed."""

    def __init__(self, model: ScriptedModel) -> None:
        self._allowed = threading.Semaphore(0)
        model.before_step = self._wait

    def _wait(self) -> None:
        assert self._allowed.acquire(timeout=60)

    def allow(self, count: int) -> None:
        self._allowed.release(count)

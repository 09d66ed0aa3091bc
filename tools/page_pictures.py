"""Takes the pictures of the page for the manual, in headless Chromium, from a server that is given some work:

    .venv/bin/longspan serve models/k31-tiny --cache-gib 0.04 &
    .venv/bin/python tools/page_pictures.py http://127.0.0.1:8000 docs

It needs Chromium (`apt-get install chromium`).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

SIZE: Any = {"width": 1280, "height": 900}
CLIENTS = 8
ENGINE_SECONDS = 45


def main(url: str, directory: Path) -> None:
    arguments = ["--no-sandbox"] if os.getuid() == 0 else []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        chat(chromium.new_page(viewport=SIZE), url, directory / "page-chat.png")
        dark = chromium.new_page(viewport=SIZE, color_scheme="dark")
        engine(dark, url, directory / "page-engine.png")
        chromium.close()


def chat(page: Any, url: str, picture: Path) -> None:
    """A question, a call, its result; the reasoning of the first answer unfolded."""
    page.goto(url)
    page.click("nav [data-shows=settings]")
    page.fill("#temperature", "0")
    page.click("#example-tool")
    ask(page, "What is 417 + 286?")
    ask(page, "What is the weather in Oslo?")
    page.fill(".results textarea", "21 degrees")
    page.click(".results button")
    page.wait_for_selector("#send:visible")
    page.click("summary >> nth=0")
    page.locator("#scroller").evaluate("box => box.scrollTop = 0")
    page.screenshot(path=picture)


def engine(page: Any, url: str, picture: Path) -> None:
    """The live view beside a chat, after a while of conversations that grow and share their beginnings."""
    page.goto(url)
    page.click("nav [data-shows=settings]")
    page.fill("#temperature", "0")
    page.click("nav [data-shows=engine]")
    deadline = time.monotonic() + ENGINE_SECONDS
    clients = [threading.Thread(target=converse, args=(url, seed, deadline)) for seed in range(CLIENTS)]
    for client in clients:
        client.start()
    for question in ("What is the opposite of hot?", "What is 128 + 256?", "What is 703 + 196?"):
        page.wait_for_timeout(1000 * ENGINE_SECONDS / 5)
        ask(page, question)
    page.wait_for_selector("#engine svg[aria-label*=' running']:not([aria-label^='0 '])")
    page.screenshot(path=picture)
    for client in clients:
        client.join()


def ask(page: Any, question: str) -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")
    page.wait_for_selector("#send:visible")


def converse(url: str, seed: int, deadline: float) -> None:
    """Chats of a few turns, with pauses."""
    rng = random.Random(seed)
    system = {"role": "system", "content": "Answer in a few words. " * 60}
    messages = [system]
    while time.monotonic() < deadline:
        if len(messages) > 20:
            messages = [system]
        messages.append({"role": "user", "content": f"What is {rng.randrange(500)} + {rng.randrange(500)}?"})
        body = json.dumps({"messages": messages, "temperature": 0, "max_tokens": 200}).encode()
        with urllib.request.urlopen(f"{url}/v1/chat/completions", body) as answer:
            message = json.load(answer)["choices"][0]["message"]
        messages.append({"role": "assistant", "content": message["content"] or ""})
        time.sleep(rng.random())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

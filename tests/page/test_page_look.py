"""What the page looks like, wide and narrow, by day and by night; and its use without mouse or eyes."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from support.browser import THINK_END, Visit, visited
from support.scripted import Running

PIXELS = """async ([png, [x, y, width, height]]) => {
  const image = new Image();
  image.src = `data:image/png;base64,${png}`;
  await image.decode();
  const canvas = new OffscreenCanvas(width, height).getContext('2d');
  canvas.drawImage(image, -x, -y);
  const { data } = canvas.getImageData(0, 0, width, height);
  const counts = new Map();
  for (let i = 0; i < data.length; i += 4) {
    const color = data.slice(i, i + 3).join();
    counts.set(color, (counts.get(color) ?? 0) + 1);
  }
  const [color, most] = [...counts].sort(([, a], [, b]) => b - a)[0];
  return { ground: color.split(',').map(Number), ink: 1 - most / (width * height), colors: counts.size };
}"""


class Picture:
    """A screenshot, looked at by regions."""

    def __init__(self, visit: Visit) -> None:
        self._png = base64.b64encode(visit.page.screenshot(animations="disabled")).decode()
        self._page = visit.page
        self._blank = visit.page.context.new_page()  # the page's own policy forbids images of data

    def region(self, selector: str) -> dict[str, Any]:
        """Of the first element that matches: its commonest colour, the share and the number of others."""
        box = self._page.locator(selector).first.bounding_box()
        area = [round(box[side]) for side in ("x", "y", "width", "height")]
        return self._blank.evaluate(PIXELS, [self._png, area])


def conversation(server: Running, visit: Visit) -> None:
    server.say(f"Let me see.{THINK_END}It is **703**.\n\n```python\nprint(417 + 286)\n```")
    visit.ask("417 + 286?")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_conversation_and_the_engine_are_drawn(server: Running, browser: Any, scheme: str) -> None:
    visit = visited(server, browser, color_scheme=scheme)
    conversation(server, visit)
    visit.show("engine")
    visit.page.locator("#engine td").first.wait_for()
    picture = Picture(visit)
    for place in (".user .text", "summary", ".content p", "figure.code", "#composer", "nav", ".card"):
        region = picture.region(place)
        assert 0.01 < region["ink"] < 0.7 and region["colors"] > 8, (place, region)  # text on a ground
    light = scheme == "light"
    assert all((part > 128) == light for part in picture.region("#scroller")["ground"])
    accent = picture.region("#send")["ground"]
    assert accent[2] > accent[0] + 30  # the one blue button
    visit.page.context.close()
    visit.check()


def box(visit: Visit, selector: str) -> Any:
    return visit.page.locator(selector).first.bounding_box()


def test_a_wide_window_shows_the_chat_beside_the_other_views(server: Running, visit: Visit) -> None:
    visit.page.set_viewport_size({"width": 1600, "height": 900})
    conversation(server, visit)
    for view in ("engine", "settings"):
        visit.show(view)
        left, right = box(visit, "#chat"), box(visit, f"#{view}")
        assert left["x"] + left["width"] <= right["x"] and left["width"] > right["width"] > 300
    user, answer = box(visit, ".user .text"), box(visit, ".content p")
    assert user["y"] + user["height"] <= answer["y"] and user["x"] > answer["x"]


@pytest.mark.parametrize("width", [360, 800])
def test_a_narrow_window_shows_one_view_at_a_time(server: Running, visit: Visit, width: int) -> None:
    visit.page.set_viewport_size({"width": width, "height": 640})
    conversation(server, visit)
    for view in ("engine", "settings", "chat"):
        visit.show(view)
        assert [name for name in ("chat", "engine", "settings") if visit.page.is_visible(f"#{name}")] == [
            view
        ]
        assert visit.page.evaluate("document.documentElement.scrollWidth") == width
    assert box(visit, "#composer")["y"] + box(visit, "#composer")["height"] <= 640


def test_every_control_has_a_name_and_is_reached_by_tab(server: Running, visit: Visit) -> None:
    conversation(server, visit)
    visit.set(format="json_schema")
    nameless = """() => [...document.querySelectorAll('button, input, select, textarea')]
        .filter((control) => !control.matches('button:not(:empty), [aria-label]') && !control.labels.length)
        .map((control) => control.outerHTML)"""
    assert visit.page.evaluate(nameless) == []
    wanted = visit.page.locator(":is(button, input, select, textarea, summary):visible").count()
    visit.page.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(wanted + 20):
        visit.page.keyboard.press("Tab")
        code = "[...document.querySelectorAll('*')].indexOf(document.activeElement)"
        if visit.page.evaluate("document.activeElement.matches('button, input, select, textarea, summary')"):
            reached.add(visit.page.evaluate(code))
    assert len(reached) == wanted


def test_the_pictures_of_the_manual_are_small_and_there() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for name in ("page-chat.png", "page-engine.png"):
        assert 10_000 < (docs / name).stat().st_size < 150_000

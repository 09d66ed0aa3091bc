"""The live view of the engine: its numbers move, and it rests while nobody looks."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from support.browser import THINK_END, Steps, Visit
from support.scripted import Running

HISTOGRAM = """# TYPE h histogram
h_bucket{le="1.0",m="a}\\"b\\\\"} 10.0
h_bucket{le="2.0",m="a}\\"b\\\\"} 20.0
h_bucket{le="+Inf",m="a}\\"b\\\\"} 25.0
h_sum{m="a}\\"b\\\\"} 40.0
"""


def test_the_numbers_move_with_the_engine(server: Running, visit: Visit) -> None:
    visit.show("engine")
    visit.page.wait_for_selector("text=Live, every second")
    steps = Steps(server.model)
    server.say(f"{THINK_END}{'word ' * 200}")
    visit.ask("Go on", wait=False)
    steps.allow(20)
    running = visit.page.locator("#engine dt:has-text('Running') + dd >> nth=0")
    running.filter(has_text="1").wait_for()
    generation = "#engine svg[aria-label^=Generation]"
    steps.allow(1000)
    visit.wait_for_answer()
    visit.page.wait_for_selector(f"{generation}:not([aria-label*=' 0 '])", state="attached")
    running.filter(has_text="0").wait_for()
    assert visit.page.locator(f"{generation} path.line").get_attribute("d").count("L") >= 2
    rows = visit.texts("#engine tbody th")
    assert rows[:2] == ["First token", "Between tokens"]
    assert all(text.endswith("s") for text in visit.texts("#engine tbody td"))


def test_it_rests_unless_it_is_in_sight(server: Running, visit: Visit) -> None:
    def polls() -> int:
        return sum(request.url.endswith("/metrics") for request in visit.requests)

    visit.page.wait_for_timeout(1100)
    assert polls() == 0
    visit.show("engine")
    visit.page.wait_for_selector("text=Live, every second")
    visit.show("chat")
    visit.page.wait_for_selector("#engine-state:has-text('Paused')", state="attached")
    before = polls()
    visit.page.wait_for_timeout(1100)
    assert 1 <= polls() == before


def test_the_arena_is_shown_by_kind_and_the_rest_is_free(visit: Visit) -> None:
    lines = ["longspan:arena_total_bytes 4096"]
    for i, labels in enumerate(("page,running", "page,cached", "state,running", "state,cached"), start=1):
        kind, owner = labels.split(",")
        lines.append(f'longspan:arena_bytes{{kind="{kind}",owner="{owner}"}} {i * 128}')
    visit.page.route("**/metrics", lambda route: route.fulfill(body="\n".join(lines)))
    visit.show("engine")
    visit.page.wait_for_selector("text=Live, every second")
    sizes = visit.texts("#engine .legend >> nth=0 >> dd")
    assert sizes == ["128 B", "256 B", "384 B", "512 B", "2.8 KiB"]
    widths = visit.page.evaluate("[...document.querySelector('.bar').children].map(s => s.style.flexGrow)")
    assert widths == ["128", "256", "384", "512", "2816"]
    assert not visit.page.is_visible("text=Tokens per second")  # this server does not count them


def test_a_server_that_is_gone_is_told(visit: Visit) -> None:
    visit.refusals_expected = True
    visit.page.route("**/metrics", lambda route: route.abort())
    visit.show("engine")
    visit.page.wait_for_selector("text=The server can't be reached")
    visit.complaints.clear()


def test_the_exposition_is_read_as_prometheus_reads_it(server: Running, library: Visit) -> None:
    text = server.get("/metrics").text + HISTOGRAM
    expected: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            expected[sample.name] = expected.get(sample.name, 0) + sample.value
    names = sorted(expected)
    code = "const s = new it.Snapshot(given.text, 0); return given.names.map((name) => s.value(name));"
    found = library.module("exposition", code, {"text": text, "names": names})
    assert dict(zip(names, found, strict=True)) == expected
    code = "return new it.Snapshot(given, 0).value('h_sum', {m: 'a}\"b\\\\'});"
    assert library.module("exposition", code, HISTOGRAM) == 40


def test_quantiles_lie_in_their_buckets(library: Visit) -> None:
    code = """
      const now = new it.Snapshot(given, 1);
      const before = new it.Snapshot(given.replaceAll(/ (10|20|25).0/g, ' 10.0'), 0);
      return [it.quantiles(now, null, 'h', [0, 0.2, 0.4, 0.6, 0.8, 1]), it.quantiles(now, before, 'h', [0.5]),
              it.quantiles(now, now, 'h', [0.5]), it.quantiles(now, null, 'none', [0.5])];
    """
    found: list[Any] = library.module("exposition", code, HISTOGRAM)
    assert found == [[0, 0.5, 1, 1.5, 2, 2], [1.75], None, None]

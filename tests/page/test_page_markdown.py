"""Markdown of an answer: what it becomes; a stream ends as the whole text does; odd text costs no time."""

from __future__ import annotations

import pytest
from support.browser import Visit

SHOWN = "const box = document.createElement('div'); const view = new it.MarkdownView(box);"
NEW_TAB = 'target="_blank" rel="noopener noreferrer"'
CASES = {
    "": "",
    "a\nb": "<p>a\nb</p>",
    "a\n\nb": "<p>a</p><p>b</p>",
    "# A *b*": "<h3>A <em>b</em></h3>",
    "#hashtag": "<p>#hashtag</p>",
    "a **b** _c_ ~~d~~": "<p>a <strong>b</strong> <em>c</em> <del>d</del></p>",
    "***a***": "<p><strong><em>a</em></strong></p>",
    "**a *b* c**": "<p><strong>a <em>b</em> c</strong></p>",
    "*a **b** c*": "<p><em>a <strong>b</strong> c</em></p>",
    "3 * 4 * 5 and snake_case_name and **open": "<p>3 * 4 * 5 and snake_case_name and **open</p>",
    "`a *b*` ``c ` d``": "<p><code>a *b*</code> <code>c ` d</code></p>",
    r"\*a\* \`b\`": "<p>*a* `b`</p>",
    "- a\n- b\n  - c\n  - d\n- e": "<ul><li>a</li><li>b<ul><li>c</li><li>d</li></ul></li><li>e</li></ul>",
    "3. a\n\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "- a\n1. b": '<ul><li>a</li></ul><ol start="1"><li>b</li></ol>',
    "- a\n  b\nc": "<ul><li>a\nb\nc</li></ul>",
    "- a\n\n  b": "<ul><li>a<p>b</p></li></ul>",
    "- a\n\nb": "<ul><li>a</li></ul><p>b</p>",
    "-": "<ul><li></li></ul>",
    "---": "<hr>",
    "a\n---\nb": "<p>a</p><hr><p>b</p>",
    "> a\n> - b": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>",
    "1 | 2": "<p>1 | 2</p>",
    "<b>&amp;": "<p>&lt;b&gt;&amp;amp;</p>",
    "[a](http://x.org/?q=1&b)": f'<p><a href="http://x.org/?q=1&amp;b" {NEW_TAB}>a</a></p>',
    "see https://x.org/a.": f'<p>see <a href="https://x.org/a" {NEW_TAB}>https://x.org/a</a>.</p>',
    "[a](javascript:b) ![c](x.png)": "<p>[a](javascript:b) ![c](x.png)</p>",
}
LONG = """Intro with `code` and a list:

- one **bold**
- two

  with a paragraph

1. first
2. second
   - nested

| a | b |
|--:|:-:|
| 1 | `x` |
| 2 \\| 3 | y |

> quoted
> more

```python
def f():

    return "```"
```
## Head
last *line*
~~~
never closed
- not a list
"""


def shown(library: Visit, text: str) -> str:
    return library.module("markdown", f"{SHOWN} view.update(given); return box.innerHTML;", text)


def test_markdown_becomes_what_was_meant(library: Visit) -> None:
    assert {text: shown(library, text) for text in CASES} == CASES


def test_code_and_tables_are_kept_as_they_are(library: Visit) -> None:
    code = shown(library, "```py\na <b>\n  c\n```")
    assert "<span>py</span>" in code and "<code>a &lt;b&gt;\n  c</code>" in code
    table = shown(library, "| a | b |\n|--:|:-:|\n| 1 |\n")
    assert '<th class="right">a</th><th class="center">b</th>' in table
    assert '<td class="right">1</td><td class="center"></td>' in table


def test_a_stream_cut_anywhere_ends_as_the_whole_text_does(library: Visit) -> None:
    code = f"""
      {SHOWN} view.update(given);
      const differing = [];
      for (const size of [1, 2, 3, 7, 50]) {{
        const streamed = document.createElement('div');
        const view = new it.MarkdownView(streamed);
        for (let end = 0; end < given.length; end += size) view.update(given.slice(0, end));
        view.update(given);
        if (streamed.innerHTML !== box.innerHTML) differing.push(size, streamed.innerHTML);
      }}
      return differing;
    """
    for text in (LONG, *CASES):
        assert library.module("markdown", code, text) == []


def test_finished_blocks_are_not_built_again(library: Visit) -> None:
    code = f"""
      {SHOWN} view.update('a\\n\\nb\\n\\nc\\n');
      const first = box.firstChild;
      view.update('a\\n\\nb\\n\\nc\\n\\nd');
      return [first === box.firstChild, box.textContent];
    """
    same, text = library.module("markdown", code)
    assert (same, text) == (True, "abcd")


UNCLOSED = ["*a ", "**a", "[", "`", "> ", "- ", "_", "~~", "| ", "\\", "*_", "[a](", "``` ", "a\n"]


@pytest.mark.parametrize("unit", UNCLOSED)
def test_text_that_opens_without_end_is_shown_at_once(library: Visit, unit: str) -> None:
    # In quadratic time this would never end; the page's own limit would end the test.
    text = unit * (300_000 // len(unit))
    assert (
        library.module("markdown", f"{SHOWN} view.update(given); return box.textContent.length;", text) >= 0
    )

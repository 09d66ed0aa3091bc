"""Chatting on the page: what streams in has its place, can be stopped, edited, asked again and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.browser import THINK_END, Steps, Visit, visited
from support.scripted import Reciter, Running, ScriptedModel, running_server

from longspan.chat import Tokenizer

CALL = (
    '<|open|>tools<|sep|><|open|>call tool="stock" index="1"<|sep|>'
    '<|open|>argument key="sku" type="string"<|sep|>'
    "A-1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
)
TOOL = {"type": "function", "function": {"name": "stock", "parameters": {"type": "object", "properties": {}}}}
ATTACK = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>[a](javascript:window.hit=1)'


def test_reasoning_is_open_while_it_streams_and_folded_afterwards(server: Running, visit: Visit) -> None:
    total = server.say(f"Let me see.{THINK_END}It is **703**.") + 1  # and the end of the message
    steps = Steps(server.model)
    visit.ask("417 + 286?", wait=False)
    steps.allow(3)
    thinking = visit.page.locator(".thinking")
    thinking.locator("text=Let").wait_for()
    assert thinking.get_attribute("open") is not None
    assert visit.texts("summary")[0].startswith("Thinking")
    assert visit.page.is_visible("#stop") and not visit.page.is_visible("#send")
    steps.allow(1000)
    visit.wait_for_answer()
    assert thinking.get_attribute("open") is None
    summary = visit.texts("summary")[0]
    assert summary.startswith("Thought ·") and "token" in summary
    assert visit.page.inner_html(".content") == "<p>It is <strong>703</strong>.</p>"
    stats = visit.texts(".stats")[0]
    for fact in ("prompt ", "cached ", f"output {total}", "first token", "tokens/s"):
        assert fact in stats, stats
    assert "703" in visit.page.inner_text("#status")  # said once, for who can't see it


def test_a_call_is_shown_and_goes_on_with_the_result_that_is_pasted(server: Running, visit: Visit) -> None:
    visit.set(tools=json.dumps([TOOL]))
    server.say(f"I call.{THINK_END}<|close|>response<|sep|>{CALL}")
    visit.ask("How many A-1?")
    assert visit.texts(".titled h3") == ["Calls stock"]
    assert json.loads(visit.texts(".titled pre")[0]) == {"sku": "A-1"}
    server.say(f"{THINK_END}There are 7.")
    visit.page.fill(".results textarea", "7 <b>pieces</b>")
    visit.page.click(".results button")
    visit.wait_for_answer()
    assert visit.texts(".content")[-1] == "There are 7."
    assert visit.texts(".turn.tool pre") == ["7 <b>pieces</b>"] and not visit.page.is_visible(".results")
    sent = visit.bodies()[-1]
    assert sent["tools"] == [TOOL]
    call, result = sent["messages"][-2:]
    assert call["reasoning_content"] == "I call." and "meta" not in call
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]
    assert "7 <b>pieces</b>" in server.last_prompt()


@pytest.mark.parametrize("way", ["Escape", "button"])
def test_stopping_ends_the_request_and_keeps_what_came(server: Running, visit: Visit, way: str) -> None:
    server.say(f"{THINK_END}{'word ' * 500}")
    steps = Steps(server.model)
    visit.ask("Go on", wait=False)
    steps.allow(30)
    visit.page.locator(".content >> text=word word").wait_for()
    visit.page.keyboard.press("Escape") if way == "Escape" else visit.page.click("#stop")
    visit.page.wait_for_selector("#send:visible")
    steps.allow(2)  # one may have begun, and then it is over
    server.wait_until_idle()
    server.model.before_step = lambda: None
    assert "stopped" in visit.texts(".stats")[0] and "word word" in visit.texts(".content")[0]
    server.say(f"{THINK_END}Yes.")
    visit.ask("Still there?")
    assert visit.texts(".content")[-1] == "Yes."


def test_text_from_anywhere_is_never_markup(server: Running, visit: Visit) -> None:
    visit.set(system=ATTACK)
    blocks = [ATTACK, f"```{ATTACK}\n{ATTACK}\n```", f"| {ATTACK} |\n|---|", f"- {ATTACK}", f"# {ATTACK}"]
    text = "\n\n".join(blocks)
    server.say(f"{ATTACK}{THINK_END}{text}")
    visit.ask(ATTACK)
    visit.page.click("summary")
    inside = [f".content {tag}" for tag in ("p", "code", "th", "li", "h3")]
    for place in (".user .text", ".thinking .text", *inside):
        assert ATTACK in visit.texts(place)[0], place
    assert visit.page.locator("#turns :is(img, script, iframe, a[href^=javascript])").count() == 0
    visit.page.reload()
    assert ATTACK in visit.texts(".turn.user .text")[0]
    assert visit.page.evaluate("window.hit") is None


def test_a_refusal_is_shown_in_full_and_can_be_mended(server: Running, visit: Visit) -> None:
    visit.refusals_expected = True
    visit.set(temperature="20000")
    visit.ask("Hello")
    refused = server.post("/v1/chat/completions", visit.bodies()[0]).json()["error"]
    error = visit.texts(".error")[0]
    assert refused["message"] in error and "400" in error and "temperature" in error
    visit.set(temperature="")
    server.say(f"{THINK_END}Hello.")
    visit.page.click("text=Regenerate")
    visit.wait_for_answer()
    assert visit.texts(".content") == ["Hello."] and not visit.page.is_visible(".error")


def test_a_failure_in_the_middle_keeps_what_came_and_says_why(server: Running, visit: Visit) -> None:
    server.say(f"{THINK_END}{'word ' * 50}")
    steps = Steps(server.model)
    visit.ask("Hello", wait=False)
    steps.allow(20)
    visit.page.locator(".content >> text=word word").wait_for()

    def fail() -> None:
        raise RuntimeError("no such luck")

    server.model.before_step = fail
    steps.allow(1)
    visit.wait_for_answer()
    assert "word word" in visit.texts(".content")[0]
    assert "500" in visit.texts(".error")[0]


def test_a_setting_that_cannot_be_used_is_named_and_nothing_is_sent(visit: Visit) -> None:
    visit.set(tools='[{"type": ')
    visit.show("chat")
    visit.page.fill("#question", "Hello")
    visit.page.press("#question", "Enter")
    assert "Not JSON" in visit.page.inner_text("#tools-note")
    assert visit.page.evaluate("document.activeElement.id") == "tools"
    assert visit.page.input_value("#question") == "Hello" and visit.bodies() == []


def test_settings_reach_the_request_and_empty_ones_do_not(server: Running, visit: Visit) -> None:
    server.say(f"{THINK_END}Yes.")
    visit.ask("First")
    assert set(visit.bodies()[0]) == {"model", "messages", "stream", "stream_options"}
    visit.refusals_expected = True  # whether or not this server can do all of it
    visit.set(system="Be brief.", temperature="0", top_p="0.5", max_tokens="40", seed="7", effort="low")
    visit.set(format="json_schema", schema='{"type": "object"}')
    visit.ask("Second")
    sent = visit.bodies()[1]
    expected: dict[str, Any] = {"temperature": 0, "top_p": 0.5, "max_tokens": 40, "seed": 7}
    assert (expected | {"reasoning_effort": "low"}).items() <= sent.items()
    schema = sent["response_format"]["json_schema"]
    assert (sent["response_format"]["type"], schema["schema"]) == ("json_schema", {"type": "object"})
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}


def test_an_answer_in_json_is_shown_as_it_is(server: Running, visit: Visit) -> None:
    visit.set(format="json_object")
    server.say(f'{THINK_END}{{"a": "*b* _c_"}}')
    visit.ask("One")
    assert visit.texts(".content pre") == ['{"a": "*b* _c_"}']
    visit.refusals_expected = True
    visit.set(temperature="20000")
    visit.ask("Two")
    assert visit.page.locator(".content pre").count() == 1  # no empty box beside the error


def test_leaving_the_page_in_the_middle_keeps_what_came_and_frees_the_engine(
    server: Running, visit: Visit
) -> None:
    server.say(f"{THINK_END}{'word ' * 500}")
    steps = Steps(server.model)
    visit.ask("Go on", wait=False)
    steps.allow(30)
    visit.page.locator(".content >> text=word word").wait_for()
    visit.page.reload()
    steps.allow(2)
    server.wait_until_idle()
    server.model.before_step = lambda: None
    assert "word word" in visit.texts(".content")[0] and "stopped" in visit.texts(".stats")[0]
    server.say(f"{THINK_END}Again.")
    visit.page.click("text=Regenerate")
    visit.wait_for_answer()
    assert visit.texts(".content") == ["Again."]


def test_an_edited_message_goes_back_in_history(server: Running, visit: Visit) -> None:
    server.say(f"{THINK_END}Fine.")
    visit.ask("One")
    visit.ask("Two")
    visit.page.click("text=Edit >> nth=0")
    visit.page.fill(".turn.user textarea", "Three")
    visit.page.press(".turn.user textarea", "Enter")
    visit.wait_for_answer()
    assert visit.texts(".turn.user .text") == ["Three"] and visit.texts(".content") == ["Fine."]
    assert visit.bodies()[-1]["messages"] == [{"role": "user", "content": "Three"}]


def test_an_answer_can_be_asked_for_again(server: Running, visit: Visit) -> None:
    server.say(f"{THINK_END}Fine.")
    visit.ask("One")
    server.say(f"{THINK_END}Better.")
    visit.page.click("text=Regenerate")
    visit.wait_for_answer()
    assert visit.texts(".content") == ["Better."]
    first, second = visit.bodies()
    assert first["messages"] == second["messages"]


def test_shift_and_enter_breaks_the_line(server: Running, visit: Visit) -> None:
    server.say(f"{THINK_END}Fine.")
    visit.page.fill("#question", "One")
    visit.page.press("#question", "Shift+Enter")
    visit.page.keyboard.type("Two")
    visit.page.keyboard.press("Enter")
    visit.wait_for_answer()
    assert visit.bodies()[0]["messages"][0]["content"] == "One\nTwo"


def test_the_conversation_survives_a_reload_and_travels_as_json(
    server: Running, visit: Visit, browser: Any, tmp_path: Path
) -> None:
    visit.set(system="Be brief.", seed="7")
    server.say(f"Hm.{THINK_END}Fine.")
    visit.ask("One")
    seen = visit.texts(".turn")
    visit.page.reload()
    assert visit.texts(".turn") == seen and visit.page.input_value("#seed") == "7"
    with visit.page.expect_download() as download:
        visit.page.click("#export")
    file = tmp_path / "conversation.json"
    download.value.save_as(file)
    other = visited(server, browser)
    other.page.set_input_files("#file", file)
    other.page.wait_for_selector(".turn.assistant")
    assert other.texts(".turn") == seen and other.page.input_value("#system") == "Be brief."
    other.ask("Two")
    roles = [message["role"] for message in other.bodies()[0]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    other.page.context.close()
    other.check()
    visit.page.click("#new")
    assert visit.texts(".turn") == [] and visit.page.is_visible("#welcome")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not JSON"),
        ("{}", "no messages"),
        ('[{"role": "judge", "content": "x"}]', "judge"),
        ('[{"role": "user", "content": {"a": 1}}]', "text is expected"),
        ('[{"role": "assistant", "tool_calls": {}}]', "tool_calls"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused_and_nothing_is_lost(
    server: Running, visit: Visit, content: str, says: str
) -> None:
    server.say(f"{THINK_END}Fine.")
    visit.ask("One")
    file = {"name": "x.json", "mimeType": "application/json", "buffer": content.encode()}
    visit.page.set_input_files("#file", file)
    visit.page.wait_for_selector(".error")
    assert says in visit.texts(".error")[0]
    assert visit.texts(".turn.user .text") == ["One"]


def test_a_file_with_odd_facts_about_an_answer_is_shown(visit: Visit) -> None:
    odd = {
        "finish": 7,
        "speed": "fast",
        "ttft": {},
        "prompt": 3,
        "error": {"message": [1], "status": {}},
        "json": "no",
        "x": 1,
    }
    content = json.dumps([{"role": "assistant", "content": "Hello", "meta": odd}]).encode()
    visit.page.set_input_files("#file", {"name": "x.json", "mimeType": "application/json", "buffer": content})
    visit.page.wait_for_selector(".error")
    for _ in range(2):
        assert visit.texts(".content") == ["Hello"]
        visit.page.reload()


def test_a_key_is_asked_for_kept_for_the_tab_and_sent(tokenizer: Tokenizer, browser: Any) -> None:
    with running_server(ScriptedModel(tokenizer, Reciter(tokenizer)), tokenizer, api_key="clé ✓") as server:
        visit = visited(server, browser)
        visit.refusals_expected = True
        visit.page.wait_for_selector("#api-key:focus")
        assert "API key" in visit.page.inner_text("#api-key-note")
        visit.page.fill("#api-key", "clé ✓")
        visit.page.press("#api-key", "Tab")
        visit.page.wait_for_selector("#model option", state="attached")
        server.say(f"{THINK_END}Fine.")
        visit.ask("One")
        assert visit.texts(".content") == ["Fine."]
        assert "clé" not in visit.page.evaluate("JSON.stringify(localStorage)")
        visit.page.context.close()
        visit.check()

"""SGLang's /generate and the routes that its router and its benchmark ask."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.scripted import Hold, Reciter, Running, ScriptedModel, running_server

from longspan.chat import Tokenizer

PATH = "/generate"
TEXT = "God created the heaven and 하늘 👩‍👩‍👧 the earth."


@pytest.fixture
def own_server(tokenizer: Tokenizer) -> Iterator[Running]:
    with running_server(ScriptedModel(tokenizer, Reciter(tokenizer)), tokenizer) as server:
        yield server


def generate(server: Running, **body: Any) -> Any:
    answer = server.post(PATH, {"text": "In the beginning"} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server: Running, **body: Any) -> list[dict[str, Any]]:
    answer = server.post(PATH, {"text": "In the beginning", "stream": True} | body)
    *lines, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def plain(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from request to request."""
    skipped = ("id", "e2e_latency")
    info = {name: value for name, value in answer["meta_info"].items() if name not in skipped}
    return answer | {"meta_info": info}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"sampling_params": {"max_new_tokens": 3}},
        {"sampling_params": {"stop": "heaven"}},
        {"sampling_params": {"stop": ["heaven"], "no_stop_trim": True}},
        {"sampling_params": {"max_new_tokens": 60, "ignore_eos": True, "skip_special_tokens": False}},
        {"sampling_params": {"n": 2}},
        {"text": ["One", "Two"], "sampling_params": [{"max_new_tokens": 2}, {"n": 2}]},
        {"text": None, "input_ids": [1, 2, 3]},
        {"text": None, "input_ids": [[1, 2, 3], [4]]},
        {
            "return_logprob": True,
            "top_logprobs_num": 2,
            "logprob_start_len": 0,
            "return_text_in_logprobs": True,
        },
    ],
)
def test_the_last_event_of_each_choice_is_the_whole_answer(server: Running, body: dict[str, Any]) -> None:
    server.say(TEXT)
    whole = generate(server, **body)
    last: dict[int, dict[str, Any]] = {}
    for event in events(server, **body):
        before = last.get(event.get("index", 0), {"text": "", "output_ids": []})
        assert event["text"].startswith(before["text"])
        assert event["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        last[event.get("index", 0)] = event
    answers = whole if isinstance(whole, list) else [whole]
    assert [plain(last[i]) for i in range(len(answers))] == [plain(answer) for answer in answers]


def test_an_answer_says_what_was_counted(server: Running) -> None:
    length = server.say(TEXT) + 1  # and the end of the message
    answer = generate(server, rid="mine")
    info = answer["meta_info"]
    assert answer["text"] == TEXT and len(answer["output_ids"]) == length
    assert (info["id"], info["completion_tokens"], info["cached_tokens"]) == ("mine", length, 0)
    assert info["prompt_tokens"] == len(server.model.script.prompts[-1])
    assert info["finish_reason"] == {"type": "stop", "matched": server.model.end}
    assert info["e2e_latency"] > 0


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"max_new_tokens": 3}, {"type": "length", "length": 3}),
        ({"stop": ["heaven"]}, {"type": "stop", "matched": "heaven"}),
    ],
)
def test_the_reason_of_an_end_has_sglangs_shape(
    server: Running, params: dict[str, Any], reason: dict[str, Any]
) -> None:
    server.say(TEXT)
    assert generate(server, sampling_params=params)["meta_info"]["finish_reason"] == reason


def test_answers_of_a_batch_are_in_the_order_of_its_prompts_with_their_choices(server: Running) -> None:
    server.say("x")
    answers = generate(server, text=["One", "Two"], rid=["a", "b"], sampling_params=[{"n": 2}, {}])
    assert [(a["index"], a["meta_info"]["id"]) for a in answers] == [(0, "a"), (1, "a"), (2, "b")]
    assert isinstance(generate(server, text=["One"]), list) and isinstance(generate(server), dict)


def test_logprobs_of_prompt_and_reply_come_as_triples(server: Running) -> None:
    server.say(" earth")
    prompt = server.engine.tokenizer.encode("the heaven and the")
    body = {"text": None, "input_ids": prompt, "return_logprob": True, "top_logprobs_num": 2}
    info = generate(server, **body, logprob_start_len=1, return_text_in_logprobs=True)["meta_info"]
    first, *rest = info["input_token_logprobs"]
    assert first[0] is None and [entry[1] for entry in info["input_token_logprobs"]] == prompt[1:]
    assert all(logprob <= 0 and isinstance(text, str) for logprob, _, text in rest)
    reply = info["output_token_logprobs"]
    assert [token for _, token, _ in reply][:-1] == server.engine.tokenizer.encode(" earth")
    assert [len(best) for best in info["output_top_logprobs"]] == [2] * len(reply)
    assert info["input_top_logprobs"][0] is None
    info = generate(server, **body)["meta_info"]
    assert info["input_token_logprobs"] == [] and info["output_token_logprobs"][0][2] is None
    assert "output_token_logprobs" not in generate(server)["meta_info"]


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"regex": "[ab]{3}c"}, None),
        ({"json_schema": '{"enum": [17]}'}, "17"),
        ({"ebnf": 'root ::= "yes"'}, "yes"),
    ],
)
def test_a_structure_is_obeyed(server: Running, params: dict[str, Any], text: str | None) -> None:
    server.say("No.")
    said = generate(server, sampling_params=params | {"temperature": 0})["text"]
    assert said == text if text else (len(said) == 4 and said.endswith("c"))


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"text": None}, "text", "input_ids"),
        ({"input_ids": [1]}, "text", "input_ids"),
        ({"text": []}, "text", "empty"),
        ({"text": ""}, "prompt", "empty"),
        ({"text": None, "input_ids": []}, "prompt", "empty"),
        ({"text": None, "input_ids": [[1], 2]}, "input_ids", "prompt 1"),
        ({"text": None, "input_ids": [True]}, "input_ids", "ids"),
        ({"text": None, "input_ids": [2048]}, "prompt", "2047"),
        ({"image_data": "x"}, "image_data", "text"),
        ({"lora_path": "x"}, "lora_path", "adapters"),
        ({"colour": 1}, "colour", "Known fields"),
        ({"model": "gpt"}, "model", "tiny"),
        ({"sampling_params": {"max_tokens": 1}}, "sampling_params.max_tokens", "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens", "from 1"),
        ({"sampling_params": {"max_new_tokens": 9000}}, "sampling_params.max_new_tokens", "max_model_len"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature", "at least 0"),
        ({"sampling_params": {"n": 0}}, "sampling_params.n", "from 1"),
        ({"sampling_params": {"stop_regex": "x"}}, "sampling_params.stop_regex", "stop"),
        ({"sampling_params": {"json_schema": '{"type": "x"}'}}, "sampling_params.json_schema", ""),
        ({"sampling_params": {"regex": "("}}, "sampling_params.regex", ""),
        ({"sampling_params": {"logit_bias": {"dog": 1}}}, "sampling_params.logit_bias", "ids"),
        ({"sampling_params": [{}, {}]}, "sampling_params", "2 values for 1 prompts"),
        ({"rid": ["a", "b"]}, "rid", "2 values"),
        ({"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num", "20"),
        ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len", "-1"),
        ({"timeout": 0}, "timeout", "greater than 0"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_field_that_cannot_be_honoured_is_named(
    server: Running, stream: bool, fields: dict[str, Any], param: str, says: str
) -> None:
    answer = server.post(PATH, {"text": "x", "stream": stream} | fields)
    assert answer.status_code == (404 if "model" in fields else 400), answer.text
    found = answer.json()["error"]
    assert found["param"] == param and says in found["message"]


def test_what_sglangs_benchmark_sends_is_answered(server: Running) -> None:
    """Fields and order as its client for /generate has them, its nulls and falses included."""
    server.say("word ", repeat=100)
    sampling = {"temperature": 0.0, "max_new_tokens": 7, "ignore_eos": True}
    seen = events(
        server,
        sampling_params=sampling,
        lora_path=None,
        return_logprob=False,
        return_routed_experts=False,
        logprob_start_len=-1,
    )
    assert [event["meta_info"]["completion_tokens"] for event in seen] == list(range(1, 8))
    for path in ("/get_server_info", "/server_info"):
        info = server.get(path).json()
        assert info["internal_states"][0]["num_running"] == 0 and info["max_running_requests"] == 4
    for path in ("/get_model_info", "/model_info"):
        assert server.get(path).json()["is_generation"] is True
    assert server.post("/flush_cache", {}).status_code == server.get("/flush_cache").status_code == 200


def test_what_sglangs_router_adds_to_requests_changes_nothing(server: Running) -> None:
    server.say("x")
    off = dict.fromkeys(("background", "no_logs", "return_bytes", "return_entropy"), False)
    assert generate(server, **off, model=None, log_metrics=True)["text"] == "x"
    chat = {"separate_reasoning": True, "stream_reasoning": True, "no_stop_trim": False}
    more = {"return_hidden_states": False, "skip_special_tokens": True, "ignore_eos": False}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "logprobs": False,
        "continue_final_message": False,
    }
    assert server.post("/v1/chat/completions", body | chat | more).status_code == 200
    assert server.post("/v1/completions", {"prompt": "x", "no_stop_trim": False} | more).status_code == 200


def test_health_generate_makes_a_token(own_server: Running) -> None:
    for ask in (own_server.get, lambda path: own_server.post(path, {})):
        before = own_server.engine.stats.generation_tokens
        assert ask("/health_generate").status_code == 200
        assert own_server.engine.stats.generation_tokens == before + 1
    own_server.wait_until_idle()


@pytest.mark.parametrize("works", [False, True])
def test_health_generate_of_a_full_server_tells_whether_it_gets_on(
    own_server: Running, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longspan.serve.service.PROBE_SECONDS", 0.3)
    own_server.say("word ", repeat=4000)
    hold = None if works else Hold(own_server.model)
    own_server.model.before_step = (lambda: time.sleep(0.002)) if works else own_server.model.before_step
    endless = {"text": "x", "sampling_params": {"n": 4, "max_new_tokens": 4000, "ignore_eos": True}}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(own_server.post, PATH, endless | {"rid": "long"})
        while own_server.engine.stats.num_running < 4 and not (hold and hold.reached.is_set()):
            time.sleep(0.005)
        assert own_server.get("/health_generate").status_code == (200 if works else 504)
        if hold:
            hold.release()
        assert own_server.post("/abort_request", {"rid": "long"}).json() == {"aborted": 1}
        assert running.result().status_code == 200
    own_server.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [{"rid": "mine"}, {"abort_all": True}])
def test_an_aborted_request_says_so_and_keeps_what_came(
    own_server: Running, stream: bool, body: dict[str, Any]
) -> None:
    own_server.say("word ", repeat=4000)
    going = threading.Event()
    steps = iter(range(10))

    def step() -> None:
        time.sleep(0.002)
        if next(steps, None) is None:
            going.set()

    own_server.model.before_step = step
    endless = {"text": "x", "rid": "mine", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(own_server.post, PATH, endless | {"stream": stream})
        chat = {"messages": [{"role": "user", "content": "x"}], "request_id": "mine", "max_tokens": 4000}
        chatting = pool.submit(own_server.post, "/v1/chat/completions", chat)
        assert going.wait(30)
        while own_server.engine.stats.num_running < 2:
            time.sleep(0.005)
        assert own_server.post("/abort_request", {"rid": "other"}).json() == {"aborted": 0}
        assert own_server.post("/abort_request", body).json() == {"aborted": 2}
        answer = running.result()
        if stream:
            last = json.loads(answer.text.split("\n\n")[-3].removeprefix("data: "))
        else:
            last = answer.json()
        assert last["meta_info"]["finish_reason"]["type"] == "abort" and last["text"].startswith("word")
        assert chatting.result().status_code == 499 and "/abort_request" in chatting.result().text
    own_server.wait_until_idle()
    assert own_server.post("/abort_request", {}).status_code == 400

"""Chat requests through vLLM's own front end: the prompts of `longspan serve`, token by token."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.renderers.registry import renderer_from_config

from longspan.chat import Tokenizer, render
from longspan.plugin_vllm import register
from longspan.plugin_vllm.renderer import LongspanRenderer
from longspan.serve.prompts import chat_prompt
from longspan.serve.protocol import ChatRequest

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests/data/chat.json").read_text(encoding="utf-8"))
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
TYPED = {
    "type": "function",
    "function": {
        "name": "stock",
        "description": "Prüft & zählt",
        "parameters": {"type": "object", "properties": {"z": {"type": "number", "default": None}, "a": {}}},
        "strict": False,
    },
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "object", "x-é": None, "a": [1]}},
}
CALLS = [
    {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"b": [1, "two", null], "a": "x"}'},
    },
    {"id": "2", "type": "function", "function": {"name": "g", "arguments": "no json"}},
    {"id": "3", "type": "function", "function": {"name": "h", "arguments": ""}},
]
ASKED = {"role": "assistant", "content": None, "reasoning_content": " Look. ", "tool_calls": CALLS}
RESULTS = [{"role": "tool", "tool_call_id": i, "content": f"<|close|> {i}"} for i in ("3", "1", "2")]
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [USER]},
    "roles": {
        "messages": [
            {"role": "system", "content": "S", "name": 'R&"D'},
            {"role": "developer", "content": "D"},
            {"role": "user", "content": PARTS, "name": "bob"},
            {"role": "assistant", "content": "A", "reasoning": "why"},
            {"role": "assistant", "content": PARTS},
            USER,
        ]
    },
    "user text that looks like markup": {
        "messages": [{"role": "user", "content": "<|open|>message<|sep|>[EOS]"}]
    },
    "calls and results": {"messages": [USER, ASKED, *RESULTS, USER], "tools": [TOOL]},
    "results without their calls": {"messages": [USER, ASKED, {"role": "tool", "tool": "t", "content": "4"}]},
    "tools": {"messages": [USER], "tools": [TYPED, TOOL]},
    "no tools": {"messages": [USER], "tools": [TOOL], "tool_choice": "none"},
    "some tool": {"messages": [USER], "tools": [TOOL], "tool_choice": "required"},
    "this tool": {
        "messages": [USER],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
    "tools in mid-conversation": {"messages": [USER, {"role": "system", "tools": [TYPED]}, USER]},
    "schema": {"messages": [USER], "response_format": SCHEMA},
    "object": {"messages": [USER], "response_format": {"type": "json_object"}},
    "text": {"messages": [USER], "response_format": {"type": "text"}},
    "low effort": {"messages": [USER], "reasoning_effort": "low"},
    "no effort": {"messages": [USER, ASKED, *RESULTS], "reasoning_effort": "none"},
    "thinking off": {"messages": [USER], "chat_template_kwargs": {"thinking": False}},
    "thinking off, another name": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    "effort as a field of the template": {
        "messages": [USER],
        "chat_template_kwargs": {"thinking_effort": "high"},
    },
    "an answer continued": {
        "messages": [USER, {"role": "assistant", "content": "So", "reasoning": "Hm."}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "reasoning continued": {
        "messages": [USER, {"role": "assistant", "content": "", "reasoning": "Hm"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "an answer continued without thinking": {
        "messages": [USER, {"role": "assistant", "content": "So"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "chat_template_kwargs": {"thinking": False},
    },
}


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    register()
    return EngineArgs(model=str(ROOT / "models/k31-tiny"), dtype="float32").create_engine_config()


@pytest.fixture(scope="module")
def front(config: VllmConfig) -> OnlineRenderer:
    return OnlineRenderer(
        config.model_config,
        renderer_from_config(config),
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=True,
        tool_parser="longspan",
        reasoning_parser="longspan",
        default_chat_template_kwargs={"cohere_format": "cmd4"},  # as its server does
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(ROOT / "models/k31-tiny")


def prompt_of(front: OnlineRenderer, body: dict[str, Any]) -> list[int]:
    body = json.loads(json.dumps(body))  # both servers may keep or change what they are given
    _, (prompt,) = asyncio.run(front.render_chat(ChatCompletionRequest(model="m", **body)))
    return prompt["prompt_token_ids"]


def test_our_tokenizer_is_chosen_by_the_model_alone(config):
    assert config.model_config.tokenizer_mode == "longspan"
    assert isinstance(renderer_from_config(config), LongspanRenderer)


@pytest.mark.parametrize("body", REQUESTS.values(), ids=REQUESTS)
def test_a_prompt_is_that_of_our_own_server(front, tokenizer, body):
    own = ChatRequest(model="m", **json.loads(json.dumps(body))).chat()
    assert prompt_of(front, body) == chat_prompt(tokenizer, own).token_ids


TEXT_ONLY = [case for case in GOLDEN if "image" not in json.dumps(case["messages"])]


@pytest.mark.parametrize("case", TEXT_ONLY, ids=lambda case: case["name"])
def test_the_golden_prompts_are_rendered(front, tokenizer, case):
    options = dict(case["options"])
    template = {name: options.pop(name) for name in ("thinking", "thinking_effort") if name in options}
    body = {"messages": case["messages"], "chat_template_kwargs": template, **options}
    expected = render(case["messages"], **({"thinking_effort": "max"} | case["options"]))
    assert prompt_of(front, body) == tokenizer.encode_segments(expected)


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "messages[0].colour"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0]"),
        ({"messages": [USER], "reasoning_effort": "medium"}, "reasoning_effort"),
        ({"messages": [USER], "chat_template_kwargs": {"style": "terse"}}, "chat_template_kwargs.style"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_what_cannot_be_rendered_is_refused_by_name(front, body, parameter):
    with pytest.raises(VLLMValidationError) as info:
        prompt_of(front, body)
    assert info.value.parameter == parameter

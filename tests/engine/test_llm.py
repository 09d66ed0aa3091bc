from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.random_checkpoint import write_checkpoint
from support.tokens import SPECIAL, write_byte_tokenizer

from longspan import LLM, SamplingParams, StructuredOutputs
from longspan.errors import CapacityError, CheckpointError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}},
    }
    for name in ("look_up", "list_all")
]
EAGER_TO_CLOSE = {256 + SPECIAL.index("<|close|>"): 20.0}
QUESTION = [{"role": "user", "content": "Well?"}]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model without a tokenizer."""
    return LLM(write_checkpoint(tmp_path_factory.mktemp("bare"), "k3.1"), dtype="float32", cache_gib=0.01)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and one token for each byte."""
    path = write_checkpoint(tmp_path_factory.mktemp("bytes"), "k3.1", vocab_size=512)
    write_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM(directory, dtype="float32", cache_gib=0.01)


def test_token_ids_need_no_tokenizer(bare: LLM) -> None:
    one, two = bare.generate([[3, 4, 5], [6, 7]], GREEDY)
    assert (one.prompt_token_ids, two.prompt_token_ids) == ([3, 4, 5], [6, 7])
    assert [len(output.outputs[0].token_ids) for output in (one, two)] == [6, 6]
    assert (one.text, one.outputs[0].finish_reason) == ("", "length")
    assert bare.generate([3, 4, 5], GREEDY)[0].outputs[0].token_ids == one.outputs[0].token_ids


def test_text_without_a_tokenizer_is_refused(bare: LLM) -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        bare.generate("hello", GREEDY)
    with pytest.raises(RequestError, match="no tokenizer"):
        bare.generate([3], SamplingParams(stop="x"))
    with pytest.raises(RequestError, match="no tokenizer"):
        bare.chat(QUESTION)


def test_a_text_is_continued(llm: LLM) -> None:
    (output,) = llm.generate("hello", GREEDY)
    assert output.prompt == "hello"
    assert output.prompt_token_ids == list(b"hello")
    assert output.text == llm.tokenizer.decode(output.outputs[0].token_ids, skip_special=True)


@pytest.mark.parametrize("params", [3, {"temperature": 0}, [GREEDY, None], "greedy"])
def test_sampling_params_that_are_none_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="Give a SamplingParams or a list of them") as caught:
        llm.generate(["a", "b"], params)
    assert caught.value.param == "sampling_params"


def test_vllms_dictionaries_are_prompts(llm: LLM) -> None:
    want = llm.generate("In", GREEDY)[0]
    for prompt in ({"prompt": "In"}, {"prompt_token_ids": list(b"In")}):
        for prompts in (prompt, [prompt]):
            (output,) = llm.generate(prompts, GREEDY)
            assert output.prompt_token_ids == want.prompt_token_ids
            assert output.outputs[0].token_ids == want.outputs[0].token_ids
            assert output.prompt == prompt.get("prompt")


def test_the_model_may_be_given_by_name_and_its_dtype_be_auto(directory: Path) -> None:
    llm = LLM(model=str(directory), dtype="auto", cache_gib=0.01)
    assert llm.engine.options.dtype == "bfloat16"
    assert len(llm.generate("a", GREEDY)[0].outputs[0].token_ids) == 6


def test_results_are_in_the_order_of_the_prompts_and_equal_those_of_each_alone(llm: LLM) -> None:
    prompts = ["b", "a long one", "c" * 40, "a"]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
    assert [o.prompt for o in together] == prompts


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [
        SamplingParams(max_tokens=2, n=2, ignore_eos=True),
        SamplingParams(max_tokens=3, ignore_eos=True),
    ]
    one, two = llm.generate(["a", "b"], params)
    assert [len(choice.token_ids) for choice in one.outputs] == [2, 2]
    assert [len(choice.token_ids) for choice in two.outputs] == [3]
    with pytest.raises(RequestError, match="2 prompts and 1 sampling_params"):
        llm.generate(["a", "b"], params[:1])


def test_logprobs_come_with_the_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate("hi!", params)
    choice = output.outputs[0]
    assert choice.logprobs is not None and output.prompt_logprobs is not None
    assert [next(iter(entry)) for entry in choice.logprobs] == choice.token_ids
    first, *others = output.prompt_logprobs
    assert first is None
    assert [next(iter(entry)) for entry in others if entry] == list(b"i!")
    assert llm.generate("hi!", GREEDY)[0].outputs[0].logprobs is None


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(llm: LLM, prompt: str | list[int]) -> None:
    if prompt == []:
        assert llm.generate([], GREEDY) == []
    with pytest.raises(RequestError, match="The prompt is empty"):
        llm.generate([prompt], GREEDY)


def test_one_bad_prompt_stops_all_before_anything_runs(llm: LLM) -> None:
    before = llm.engine.stats.generation_tokens
    with pytest.raises(RequestError, match="token id 512"):
        llm.generate([[1], [512]], GREEDY)
    with pytest.raises(RequestError, match="Give each as a text"):
        llm.generate([1, "a"], GREEDY)
    assert llm.engine.stats.generation_tokens == before
    assert not llm.engine.has_work


def test_an_interrupt_leaves_the_engine_clean(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.engine.step

    def interrupted() -> list:
        step()
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY)
    assert not llm.engine.has_work
    assert llm.engine.memory.use().state_bytes_running == 0


def test_a_chat_gives_reasoning_or_content(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, logit_bias={ord("a"): 100.0})
    (thinking,) = llm.chat(QUESTION, params)
    (plain,) = llm.chat(QUESTION, params, thinking=False)
    assert (thinking.outputs[0].reasoning, thinking.outputs[0].content) == ("a" * 12, None)
    assert (plain.outputs[0].reasoning, plain.outputs[0].content) == (None, "a" * 12)
    assert (plain.text, plain.outputs[0].text) == ("a" * 12, "a" * 12)
    assert (thinking.text, thinking.outputs[0].text) == ("", "")
    prompt = llm.tokenizer.decode(thinking.prompt_token_ids)
    assert prompt.endswith('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>')
    assert "thinking_effort=max" in prompt


def test_several_conversations_are_answered_in_order(llm: LLM) -> None:
    others = [{"role": "user", "content": "And now?"}]
    first, second = llm.chat([QUESTION, others], GREEDY)
    assert b"Well?" in bytes(b for b in first.prompt_token_ids if b < 256)
    assert second.outputs[0].token_ids == llm.chat(others, GREEDY)[0].outputs[0].token_ids


def test_a_required_tool_call_is_made(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=90, logit_bias=EAGER_TO_CLOSE)
    (output,) = llm.chat(
        QUESTION, params, tools=TOOLS, tool_choice="required", thinking=False, thinking_effort=None
    )
    choice = output.outputs[0]
    assert choice.tool_calls
    assert choice.tool_calls[0].name in ("look_up", "list_all")
    json.loads(choice.tool_calls[0].arguments)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "nobody"}}])
def test_a_forced_call_needs_a_declared_function(llm: LLM, choice: str | dict) -> None:
    tools = None if choice == "required" else TOOLS
    with pytest.raises(RequestError, match=r"no tools are declared|not declared"):
        llm.chat(QUESTION, GREEDY, tools=tools, tool_choice=choice)


def test_a_named_function_is_the_one_that_is_called(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=90, logit_bias=EAGER_TO_CLOSE)
    named = {"type": "function", "function": {"name": "list_all"}}
    (output,) = llm.chat(QUESTION, params, tools=TOOLS, tool_choice=named, thinking=False)
    assert output.outputs[0].tool_calls[0].name == "list_all"


def test_arguments_of_a_forced_call_satisfy_the_schema(llm: LLM) -> None:
    schema = {"properties": {"n": {"enum": [1, 22]}, "why": {"enum": ["a", "b"]}}, "required": ["n", "why"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=400, n=3, logit_bias=EAGER_TO_CLOSE)
    (output,) = llm.chat(QUESTION, params, tools=tools, tool_choice="required")
    for choice in output.outputs:
        arguments = json.loads(choice.tool_calls[0].arguments)
        assert arguments["n"] in (1, 22) and arguments["why"] in ("a", "b")


def test_a_response_format_shapes_the_answer_and_is_told_to_the_model(llm: LLM) -> None:
    schema = {"enum": [{"a": 1}, ["b"]]}
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=200, n=2, logit_bias=EAGER_TO_CLOSE)
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    (output,) = llm.chat(QUESTION, params, response_format=shape)
    assert all(json.loads(choice.text) in schema["enum"] for choice in output.outputs)
    assert "`response_format=json_schema`" in llm.tokenizer.decode(output.prompt_token_ids)


def test_structured_outputs_shape_texts_and_answers(llm: LLM) -> None:
    asked = [
        StructuredOutputs(regex="[ab]{3}"),
        StructuredOutputs(choice=["yes", "no"]),
        {"json": {"const": 7}},
    ]
    every = [
        SamplingParams(max_tokens=90, structured_outputs=one, logit_bias=EAGER_TO_CLOSE) for one in asked
    ]
    texts = [output.outputs[0].text for output in llm.generate(["x"] * 3, every)]
    answers = [output.outputs[0].text for output in llm.chat([QUESTION] * 3, every, thinking=False)]
    for first, second, third in (texts, answers):
        assert set(first) <= set("ab") and len(first) == 3
        assert second in ("yes", "no") and third == "7"


def test_what_cannot_be_enforced_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="can't be enforced") as error:
        llm.generate("x", SamplingParams(structured_outputs={"json": {"properties": {"a": {"not": {}}}}}))
    assert error.value.param == "structured_outputs.json.properties.a"
    with pytest.raises(RequestError, match="both given"):
        params = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
        llm.chat(QUESTION, params, response_format={"type": "json_object"})
    with pytest.raises(RequestError, match="StructuredOutputs"):
        SamplingParams(structured_outputs="json")


def test_structured_outputs_need_a_tokenizer(bare: LLM) -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        bare.generate([[1, 2]], SamplingParams(structured_outputs=StructuredOutputs(regex="a")))


def test_options_that_cannot_be_met_are_refused_before_weights_are_read(
    directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(CapacityError, match="max_model_len is 5000"):
        LLM(tmp_path, max_model_len=5000)
    with pytest.raises(CapacityError, match="lower --max-num-seqs"):
        LLM(tmp_path, max_num_seqs=1_000_000, cache_gib=0.01)
    with pytest.raises(CheckpointError):
        LLM(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    write_byte_tokenizer(write_checkpoint(tmp_path, "k3.1"))
    with pytest.raises(CheckpointError, match="vocab_size 61"):
        LLM(tmp_path)

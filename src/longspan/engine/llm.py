"""`LLM`: a checkpoint and many prompts, in one process, answered when all are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar

from longspan.chat import (
    DEFAULT_EFFORT,
    Reply,
    ReplyParser,
    Tokenizer,
    ToolCall,
    check_messages,
    collect,
    declared_functions,
    forced_functions,
    render,
)
from longspan.engine.engine import Engine
from longspan.engine.options import EngineOptions
from longspan.engine.output import FinishReason, StepOutput, TokenLogprobs
from longspan.engine.prompts import Prompt, parse_prompts
from longspan.engine.readers import ChatReader, TextReader, TokenReader
from longspan.engine.request import Request, SamplingParams
from longspan.errors import LongspanError, RequestError
from longspan.structure import Calls, Structure, Vocabulary, asked_answer, chat_structure
from longspan.token_ids import shown

Conversation = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Choice:
    """One finished answer. With `finish_reason` "error" it is what came before `error`."""

    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None  # None if not asked for
    finish_reason: FinishReason
    stop_reason: int | str | None
    error: LongspanError | None


@dataclass(frozen=True)
class TextChoice(Choice):
    """One continuation of a prompt."""

    text: str


@dataclass(frozen=True)
class ChatChoice(Choice):
    """One reply to a conversation. A tool call that was cut off is the last one, with `complete` False."""

    reasoning: str | None
    content: str | None
    tool_calls: list[ToolCall]

    @property
    def text(self) -> str:
        """The content, "" without one: the name that a continuation has for it."""
        return self.content or ""


AnyChoice = TypeVar("AnyChoice", TextChoice, ChatChoice)


@dataclass(frozen=True)
class RequestOutput(Generic[AnyChoice]):
    """The answers to one prompt."""

    request_id: str
    prompt: str | None  # None if it was given as token ids
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[AnyChoice]

    @property
    def text(self) -> str:
        """Text of the first choice; of a chat, its answer."""
        return self.outputs[0].text


class LLM:
    """A model ready to answer. Raises CapacityError before weights are read if the options can't be met."""

    def __init__(
        self,
        model: str | Path,
        dtype: str = EngineOptions.dtype,
        *,
        backend: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int = EngineOptions.max_num_batched_tokens,
        page_size: int = EngineOptions.page_size,
        cache_gib: float | None = None,
        index_key_dtype: str = EngineOptions.index_key_dtype,
        enable_prefix_caching: bool = EngineOptions.enable_prefix_caching,
        snapshot_interval: int | None = None,
        swap_gib: float | None = None,
        threads: int | None = None,
        cpus: tuple[int, ...] = (),
        seed: int | None = None,
    ) -> None:
        """`model` is a checkpoint directory. The options are those of `EngineOptions`."""
        options = EngineOptions(
            dtype=dtype,
            backend=backend,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size,
            cache_gib=cache_gib,
            index_key_dtype=index_key_dtype,
            enable_prefix_caching=enable_prefix_caching,
            snapshot_interval=snapshot_interval,
            swap_gib=swap_gib,
            max_itl_ms=0,
            async_scheduling=False,
            threads=threads,
            cpus=cpus,
            seed=seed,
        )
        self.engine = Engine.from_path(model, options)
        self._ids = count()

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError if the checkpoint has none."""
        if self.engine.tokenizer is None:
            raise RequestError(
                "This checkpoint has no tokenizer (tiktoken.model).",
                param="prompt",
                remedy="Give prompts as token ids, without stop strings.",
            )
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_progress: bool = True,
    ) -> list[RequestOutput[TextChoice]]:
        """Continues each prompt, which may be all that `parse_prompts` takes. Results are in their order.

        Raises RequestError, before anything runs, if one of the requests can't be served.
        """
        many = parse_prompts(prompts, self.engine.config.vocab_size)
        requests = []
        for prompt, params in zip(many, _params_list(sampling_params, len(many)), strict=True):
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            structure = self._text_structure(params)
            requests.append(Request(self._next_id(), ids, params, self._text_reader(params), structure))
        texts = [prompt if isinstance(prompt, str) else None for prompt in many]
        return self._run(requests, texts, _text_choice, use_progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        response_format: dict[str, Any] | None = None,
        thinking: bool = True,
        thinking_effort: str | None = DEFAULT_EFFORT,
        use_progress: bool = True,
    ) -> list[RequestOutput[ChatChoice]]:
        """Answers one conversation or each of several, of OpenAI-style messages.

        Without `sampling_params` a reply may fill the context. Raises RequestError, before anything runs, if
        one of the requests can't be served.
        """
        many: list[Conversation] = _conversation_list(messages)
        every_params = _params_list(sampling_params or SamplingParams(max_tokens=None), len(many))
        if not isinstance(thinking, bool):
            raise RequestError(f"thinking is {thinking!r}.", param="thinking", remedy="Give True or False.")
        tokenizer = self.tokenizer
        requests = []
        for conversation, params in zip(many, every_params, strict=True):
            check_messages(conversation)
            segments = render(
                conversation,
                tools,
                thinking=thinking,
                thinking_effort=thinking_effort,
                tool_choice=tool_choice,
                response_format=response_format,
                images=(),
            )
            functions = declared_functions(tools, conversation)
            forced = forced_functions(tool_choice, functions)
            may_call = [] if tool_choice == "none" else functions
            structure = chat_structure(
                self._vocabulary,
                answer=asked_answer(response_format, params.structured_outputs),
                calls=Calls(forced or may_call, bool(forced)),
                thinking=thinking,
            )
            requests.append(
                Request(
                    self._next_id(),
                    tokenizer.encode_segments(segments),
                    params,
                    _chat_reader(tokenizer, params, thinking, max_calls=0 if tool_choice == "none" else None),
                    structure,
                )
            )
        return self._run(requests, [None] * len(requests), _chat_choice, use_progress)

    def _next_id(self) -> str:
        return f"llm-{next(self._ids)}"

    def _text_reader(self, params: SamplingParams) -> Callable[[], TextReader | TokenReader]:
        if self.engine.tokenizer is None and not params.stop:
            return TokenReader
        tokenizer = self.tokenizer
        return lambda: TextReader(tokenizer, params)

    def _text_structure(self, params: SamplingParams) -> Structure | None:
        answer = asked_answer(None, params.structured_outputs)
        return answer.structure(self._vocabulary) if answer else None

    @property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer, self.engine.config.eos_token_ids)

    def _run(
        self,
        requests: list[Request],
        prompts: list[str | None],
        make_choice: Callable[[list[StepOutput]], AnyChoice],
        use_progress: bool,
    ) -> list[RequestOutput[AnyChoice]]:
        for request in requests:
            self.engine.validate(request)
        steps: dict[tuple[str, int], list[StepOutput]] = {
            (request.id, index): [] for request in requests for index in range(request.params.n)
        }
        try:
            for request in requests:
                self.engine.add(request)
            with _Progress(len(steps), enabled=use_progress) as progress:
                while self.engine.has_work:
                    for output in self.engine.step():
                        steps[output.request_id, output.index].append(output)
                        progress.advance(output)
        except BaseException:
            for request in requests:
                self.engine.abort(request.id)
            raise
        results = []
        for request, prompt in zip(requests, prompts, strict=True):
            choices = [steps[request.id, index] for index in range(request.params.n)]
            prompt_logprobs = choices[0][0].prompt_logprobs
            outputs = [make_choice(outputs) for outputs in choices]
            results.append(
                RequestOutput(request.id, prompt, request.prompt_token_ids, prompt_logprobs, outputs)
            )
        return results


class _Progress:
    """A bar on stderr for several answers, if somebody is looking."""

    def __init__(self, total: int, enabled: bool) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._bar = Progress(
            *Progress.get_default_columns()[:2],
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            console=console,
            disable=not (enabled and total > 1 and console.is_terminal),
            transient=True,
        )
        self._task = self._bar.add_task("Generating", total=total, tokens=0)
        self._tokens = 0

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, output: StepOutput) -> None:
        self._tokens += len(output.token_ids)
        done = output.finish is not None
        self._bar.update(self._task, advance=int(done), tokens=self._tokens)


def _text_choice(steps: list[StepOutput]) -> TextChoice:
    return TextChoice(**_common(steps), text="".join(delta.text for step in steps for delta in step.deltas))


def _chat_choice(steps: list[StepOutput]) -> ChatChoice:
    reply: Reply = collect(delta for step in steps for delta in step.deltas)
    return ChatChoice(
        **_common(steps),
        reasoning=reply.reasoning,
        content=reply.content,
        tool_calls=list(reply.tool_calls),
    )


def _common(steps: list[StepOutput]) -> dict[str, Any]:
    finish = steps[-1].finish
    assert finish is not None
    logprobs = [entry for step in steps for entry in step.logprobs]
    return {
        "index": steps[0].index,
        "token_ids": [token for step in steps for token in step.token_ids],
        "logprobs": logprobs or None,
        "finish_reason": finish.reason,
        "stop_reason": finish.stop_reason,
        "error": finish.error,
    }


def _conversation_list(messages: Any) -> list[Conversation]:
    return [messages] if not messages or isinstance(messages[0], dict) else list(messages)


def _params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, length: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * length
    if not isinstance(params, list | tuple) or not all(isinstance(item, SamplingParams) for item in params):
        raise RequestError(
            f"sampling_params is {shown(params)}.",
            param="sampling_params",
            remedy="Give a SamplingParams or a list of them.",
        )
    if len(params) != length:
        raise RequestError(
            f"There are {length} prompts and {len(params)} sampling_params.",
            param="sampling_params",
            remedy="Give one for all, or one for each.",
        )
    return params


def _chat_reader(
    tokenizer: Tokenizer, params: SamplingParams, thinking: bool, max_calls: int | None
) -> Callable[[], ChatReader]:
    return lambda: ChatReader(ReplyParser(tokenizer, thinking=thinking), params, max_calls=max_calls)

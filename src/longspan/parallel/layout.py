"""Who holds what of a model that several ranks compute together.

    tensor    every rank of this group has a share of the heads of KDA and MLA, of the columns inside the
              dense and shared feed-forwards, of the way back from the experts' latent, and of the vocabulary
    context   (DCP) neighbouring ranks of the tensor group that share out the tokens of every sequence; tensor
              rank r is context rank r mod size. Index keys and latents of a token are on one rank of each
              context group, KDA states are by head alone
    expert    every rank has a block of whole routed experts. The tensor group itself, or one that spans
              several replicas of it, whose tokens differ (data parallel): then tokens travel to their experts

Heads divide evenly, because memory must be the same on all ranks. Everything else is dealt in contiguous
blocks of ceil(n / size), the last ones shorter; experts may run out before the ranks do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from longspan.config import ModelConfig
from longspan.errors import ConfigError
from longspan.ops.shard import Shard
from longspan.parallel.group import ALONE, Group


def share(total: int, group: Group) -> slice:
    """This rank's block of `total` things dealt to a group."""
    block = -(-total // group.size)
    return slice(min(group.rank * block, total), min((group.rank + 1) * block, total))


@dataclass(frozen=True)
class Layout:
    """The groups of this rank. Raises ConfigError if `config` can't be dealt to them."""

    config: ModelConfig  # of the whole model
    tensor: Group = ALONE
    context: Group = ALONE
    expert: Group = ALONE
    interleave: int = 1  # tokens that lie together before the next context rank's turn

    def __post_init__(self) -> None:
        config, size = self.config, self.tensor.size
        heads = {"KDA heads": config.kda.num_heads, "attention heads": config.mla.num_heads}
        widths = {"dense feed-forward": config.intermediate_size, "vocabulary": config.vocab_size}
        moe = config.moe
        if config.moe_layers and moe.num_shared_experts:
            widths["shared experts"] = moe.num_shared_experts * moe.intermediate_size
        if config.moe_layers and moe.latent_size is not None:
            widths["experts' latent"] = moe.latent_size

        def fits(ranks: int) -> bool:
            return all(n % ranks == 0 for n in heads.values()) and all(
                _reach(n, ranks) for n in widths.values()
            )

        if not fits(size):
            found = ", ".join(f"{n} {what}" for what, n in heads.items())
            found += "; columns: " + ", ".join(f"{n} {what}" for what, n in widths.items())
            legal = ", ".join(str(n) for n in range(1, min(heads.values()) + 1) if fits(n))
            raise ConfigError(
                f"The tensor parallel size is {size}, which must divide all heads and leave no rank without "
                f"columns; the model has {found}.",
                remedy=f"Legal sizes: {legal}.",
            )
        if size % self.context.size:
            legal = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise ConfigError(
                f"The decode context parallel size is {self.context.size}; it must divide the tensor "
                f"parallel size, {size}.",
                remedy=f"Legal sizes: {legal}.",
            )
        if self.context.rank != self.tensor.rank % self.context.size:
            raise ConfigError(
                f"Tensor rank {self.tensor.rank} is rank {self.context.rank} of its decode context group of "
                f"{self.context.size}; {self.tensor.rank % self.context.size} was expected.",
                remedy="Context groups are neighbouring ranks of the tensor group.",
            )
        if self.interleave < 1:
            raise ConfigError(
                f"The interleave of decode context parallel is {self.interleave}.", remedy="Legal: 1 or more."
            )

    def check_page_size(self, page_size: int) -> None:
        """ConfigError if a page would hold part of what lies together: prefixes are kept by whole pages."""
        if self.context.size > 1 and page_size % self.interleave:
            legal = ", ".join(str(n) for n in range(1, page_size + 1) if page_size % n == 0)
            raise ConfigError(
                f"The interleave of decode context parallel is {self.interleave}; it must divide the page "
                f"size, {page_size}.",
                remedy=f"Legal: {legal}.",
            )

    @cached_property
    def local_config(self) -> ModelConfig:
        """The config by which this rank's memory is laid out, its weights are built and its decoder runs."""
        config, size = self.config, self.tensor.size
        return replace(
            config,
            kda=replace(config.kda, num_heads=config.kda.num_heads // size),
            mla=replace(config.mla, num_heads=config.mla.num_heads // size),
        )

    @property
    def shard(self) -> Shard:
        """The tokens of every sequence that are here, for `StepBatch`."""
        return Shard(self.context.rank, self.context.size, self.interleave if self.context.size > 1 else 1)

    @property
    def vocabulary(self) -> slice:
        """The token ids whose rows of embedding and lm_head are here."""
        return share(self.config.vocab_size, self.tensor)

    @property
    def context_heads(self) -> int:
        """MLA heads of the whole context group, whose queries every rank of it makes."""
        return self.local_config.mla.num_heads * self.context.size

    @property
    def own_heads(self) -> slice:
        """This rank's MLA heads among those of its context group."""
        heads = self.local_config.mla.num_heads
        return slice(self.context.rank * heads, (self.context.rank + 1) * heads)


def _reach(total: int, ranks: int) -> bool:
    """Whether blocks of ceil(total / ranks) leave something for the last rank."""
    return (ranks - 1) * -(-total // ranks) < total

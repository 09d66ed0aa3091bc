"""How a model is dealt over devices, as `longspan.parallel` does it.

tensor T    KDA heads, MLA heads, dense and shared feed-forward, the way back from the experts' latent,
            vocabulary: 1/T each
data R      whole replicas of all that, each with its own sequences
expert E    routed experts, whole ones, over T x R devices (or over the T of each replica)
context D   divides T: latents and index keys of a sequence by token over D of the T ranks; such a rank
            asks for all heads of its D ranks, so it has their query and up-key weights
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from longspan.config import ModelConfig
from longspan.errors import CapacityError


@dataclass(frozen=True)
class Split:
    """Sizes of the groups of one instance, which is `tensor * data` devices."""

    tensor: int = 1
    data: int = 1
    context: int = 1
    experts_over_data: bool = True  # vLLM's --enable-expert-parallel

    @property
    def devices(self) -> int:
        return self.tensor * self.data

    @property
    def expert(self) -> int:
        return self.devices if self.experts_over_data else self.tensor

    def experts_of_rank(self, num_experts: int) -> int:
        """Of the fullest rank."""
        return ceil(num_experts / self.expert)

    def __str__(self) -> str:
        return f"TP {self.tensor}, DP {self.data}, EP {self.expert}, DCP {self.context}"

    def check(self, config: ModelConfig) -> None:
        """Raises CapacityError if the model can't be dealt so."""
        for reason in reasons_against(config, self):
            raise CapacityError(f"{self} is not possible: {reason}.")


def reasons_against(config: ModelConfig, split: Split) -> list[str]:
    """Why the model can't be dealt so; empty if it can. Widths need not divide, the last ranks get less."""
    heads = {"KDA heads": config.kda.num_heads, "MLA heads": config.mla.num_heads}
    reasons = [f"{count} {what} over {split.tensor}" for what, count in heads.items() if count % split.tensor]
    if split.tensor % split.context:
        reasons.append(f"DCP {split.context} does not divide TP {split.tensor}")
    if split.expert > config.moe.num_experts:
        reasons.append(f"{config.moe.num_experts} experts over {split.expert}")
    return reasons


def legal_splits(config: ModelConfig, nodes: int, devices_per_node: int) -> list[Split]:
    """Of `nodes` nodes as one instance. Tensor groups stay inside a node, where links are fast."""
    found = []
    for tensor in range(1, devices_per_node + 1):
        if devices_per_node % tensor:
            continue
        for context in range(1, tensor + 1):
            if tensor % context:
                continue
            data = nodes * devices_per_node // tensor
            for over_data in (True, False) if data > 1 else (True,):
                split = Split(tensor, data, context, over_data)
                if not reasons_against(config, split):
                    found.append(split)
    return found

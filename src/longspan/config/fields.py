"""Reading one JSON object field by field; every complaint names the field, the find and the legal."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from typing import Any

from longspan.errors import ConfigError

# Generic fields of the Hugging Face config class, and fields of training. None touches inference.
HARMLESS = frozenset(
    """
    add_cross_attention attention_dropout attn_implementation auto_map aux_loss_alpha bad_words_ids
    begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size ep_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label
    ignore_index image_placeholder initializer_range is_decoder is_encoder_decoder label2id length_penalty
    max_length min_length name_or_path no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_router_logits output_scores prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    rope_theta router_aux_loss_coef sep_token_id seq_aux suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p use_bfloat16 use_cache
    """.split()  # noqa: SIM905
)

REQUIRED: Any = object()
MAX_SIZE = 2**31 - 1  # of any size or count: products of a few stay far inside of what a float can hold


def shown(value: Any) -> str:
    """A value as it stands in the JSON file, cut to a readable length."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 120 else text[:117] + "..."


class Fields:
    """One JSON object. Fields are taken by name; `finish` refuses those nobody took.

    A method given several names accepts any of them, and more than one only if they agree. null counts
    as absent. `default` is returned for an absent field; without a default an absent field is an error.
    """

    def __init__(self, values: Any, where: str = "", harmless: Iterable[str] = ()) -> None:
        self.where = where
        if not isinstance(values, dict):
            raise ConfigError(f"{where or 'config.json'} is {shown(values)}; a JSON object was expected.")
        self._values: dict[str, Any] = values
        self._taken: set[str] = set()
        self._harmless = HARMLESS.union(harmless)

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def names(self) -> list[str]:
        return list(self._values)

    def stated(self, *names: str) -> list[tuple[str, Any]]:
        """(path, value) of each of `names` that is there and not null."""
        self._taken.update(names)
        return [(self.path(n), self._values[n]) for n in names if self._values.get(n) is not None]

    def take(self, *names: str, default: Any = REQUIRED, legal: str = "") -> Any:
        """The value under one of `names`, unchecked."""
        stated = self.stated(*names)
        if not stated:
            if default is not REQUIRED:
                return default
            also = f" (also read as {', '.join(names[1:])})" if names[1:] else ""
            raise ConfigError(
                f"{self.path(names[0])}{also} is missing or null{f'; {legal} is legal' if legal else ''}.",
                remedy="Take config.json from the release that the weights came from.",
            )
        agreed(stated)
        return stated[0][1]

    def integer(self, *names: str, minimum: int = 1, maximum: int = MAX_SIZE, default: Any = REQUIRED) -> Any:
        legal = f"a whole number of at least {minimum}"
        value = self.take(*names, default=default, legal=legal)
        if value is not default and (type(value) is not int or value < minimum):
            raise self.refuse(names, value, legal)
        if value is not default and value > maximum:
            raise self.refuse(names, value, f"at most {maximum}")
        return value

    def number(self, *names: str, above: float = -math.inf, default: Any = REQUIRED) -> Any:
        legal = "a number" if above == -math.inf else f"a number above {above:g}"
        value = self.take(*names, default=default, legal=legal)
        if value is default:
            return value
        if type(value) not in (int, float) or not above < value < math.inf or abs(value) > 1e300:
            raise self.refuse(names, value, legal)
        return float(value)

    def flag(self, *names: str, default: Any = REQUIRED) -> Any:
        value = self.take(*names, default=default, legal="true or false")
        if value is not default and type(value) is not bool:
            raise self.refuse(names, value, "true or false")
        return value

    def one_of(self, name: str, legal: tuple[Any, ...], default: Any = REQUIRED) -> Any:
        """For fields with few legal values; 1 and true are told apart."""
        spelled = " or ".join(map(shown, legal))
        value = self.take(name, default=default, legal=spelled)
        if value is not default and not any(type(value) is type(x) and value == x for x in legal):
            raise self.refuse((name,), value, spelled)
        return value

    def integers(self, *names: str, default: Any = REQUIRED) -> Any:
        """A list of whole numbers, as a tuple."""
        legal = "a list of whole numbers"
        value = self.take(*names, default=default, legal=legal)
        if value is default:
            return value
        if not isinstance(value, list) or not all(type(x) is int for x in value):
            raise self.refuse(names, value, legal)
        if any(abs(x) > MAX_SIZE for x in value):
            raise self.refuse(names, value, f"{legal} of at most {MAX_SIZE}")
        return tuple(value)

    def section(self, name: str, harmless: Iterable[str] = (), default: Any = REQUIRED) -> Any:
        """A nested object as `Fields`."""
        value = self.take(name, default=default, legal="a JSON object")
        return value if value is default else Fields(value, self.path(name), harmless)

    def refuse(self, names: tuple[str, ...], value: Any, legal: str) -> ConfigError:
        name = next(n for n in names if self._values.get(n) is not None)
        return ConfigError(f"{self.path(name)} is {shown(value)}; legal is {legal}.")

    def finish(self) -> None:
        """Refuse unknown fields."""
        for name, value in self._values.items():
            if name in self._taken or name in self._harmless or name.startswith("_") or value is None:
                continue
            close = difflib.get_close_matches(name, self._taken, n=1, cutoff=0.8)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"{self.path(name)} is not a known field (found {shown(value)}).{hint}",
                remedy="If it does not change the maths of the model, rename it with a leading underscore; "
                "if it does, this version of Longspan cannot run the model.",
            )


def agreed(stated: list[tuple[str, Any]]) -> None:
    """Refuse differing values, given as (path, value), of one quantity."""
    for path, value in stated[1:]:
        first_path, first = stated[0]
        if value != first:
            raise ConfigError(
                f"{first_path} is {shown(first)} but {path} is {shown(value)}; the two must agree.",
                remedy="Take config.json from the release that the weights came from.",
            )

"""Our tokenizer as vLLM uses it: loaded by its mode, decoded piece by piece, known to grammars."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.tokenizers.registry import get_tokenizer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from longspan.errors import CheckpointError
from longspan.plugin_vllm import register
from longspan.plugin_vllm.tokenizer import LongspanTokenizer


@pytest.fixture(scope="module")
def tokenizer() -> LongspanTokenizer:
    register()
    root = Path(__file__).parents[2]
    found = get_tokenizer(root / "models/k31-tiny", tokenizer_mode="longspan", trust_remote_code=False)
    assert isinstance(found, LongspanTokenizer)
    return found


def detokenized(tokenizer: LongspanTokenizer, prompt: list[int], ids: list[int], **options) -> str:
    params = SamplingParams(**options)
    request = EngineCoreRequest(
        request_id="1",
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    decoder = IncrementalDetokenizer.from_new_request(tokenizer, request)
    text = ""
    for i, token_id in enumerate(ids):
        decoder.update([token_id], stop_terminated=False)
        text += decoder.get_next_output_text(finished=i == len(ids) - 1, delta=True)
    return text


@given(text=st.text())
def test_text_goes_in_and_comes_out_as_with_our_own(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids == tokenizer.base.encode(text) == tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == tokenizer.convert_tokens_to_string(tokenizer.convert_ids_to_tokens(ids))
    assert tokenizer.decode(ids) == text.encode(errors="replace").decode()


def test_every_id_has_a_name_of_its_own(tokenizer):
    vocabulary = tokenizer.get_vocab()
    assert sorted(vocabulary.values()) == list(range(len(tokenizer)))
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert tokenizer.convert_tokens_to_ids(names) == list(range(len(tokenizer)))
    assert [tokenizer.decode(i) for i in range(len(tokenizer))] == [
        tokenizer.convert_tokens_to_string([name]) for name in names
    ]


def test_special_tokens_are_never_read_from_text_and_can_be_left_out(tokenizer):
    assert not {*tokenizer.encode("<|open|>[EOS]")} & {*tokenizer.all_special_ids}
    ids = [tokenizer.base.special_id("<|open|>"), *tokenizer.encode("think")]
    assert tokenizer.decode(ids) == "<|open|>think"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "think"
    assert tokenizer.convert_ids_to_tokens(ids[:1], skip_special_tokens=True) == []


def test_a_reply_ends_at_what_the_checkpoint_says_not_at_the_end_of_documents(tokenizer):
    assert tokenizer.eos_token_id == tokenizer.base.special_id("<|end_of_msg|>")


def test_an_id_outside_of_the_vocabulary_has_an_empty_name(tokenizer):
    assert tokenizer.convert_ids_to_tokens([len(tokenizer)]) == [""]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_is_cut_on_the_side_asked_for(tokenizer, side):
    cut = LongspanTokenizer(tokenizer.base, eos_token_id=1, truncation_side=side)
    ids = cut.encode("one two three")
    assert cut.encode("one two three", truncation=True, max_length=len(ids)) == ids
    assert cut.encode("one two three", truncation=True, max_length=2) == (
        ids[-2:] if side == "left" else ids[:2]
    )
    assert cut.encode("one two three", truncation=True, max_length=0) == []
    assert cut.encode("one two three", truncation=False, max_length=2) == ids


def test_a_pair_of_texts_is_refused(tokenizer):
    with pytest.raises(ValueError, match="one text at a time"):
        tokenizer("a", "b")


@given(text=st.text(alphabet="ab é你👩‍👧\n ", max_size=12), prompt=st.text(max_size=8))
def test_pieces_decoded_one_by_one_add_up_to_the_text(tokenizer, prompt, text):
    ids = tokenizer.encode(text)
    assert detokenized(tokenizer, tokenizer.encode(prompt) or [0], ids) == text


def test_control_tokens_come_out_without_blanks_around_them(tokenizer):
    close, sep = tokenizer.base.special_id("<|close|>"), tokenizer.base.special_id("<|sep|>")
    ids = [*tokenizer.encode("Hm"), close, *tokenizer.encode("think"), sep, sep]
    assert detokenized(tokenizer, [0], ids, skip_special_tokens=False) == "Hm<|close|>think<|sep|><|sep|>"
    assert detokenized(tokenizer, [0], ids, skip_special_tokens=True) == "Hmthink"


def test_grammars_know_the_bytes_of_every_token(tokenizer):
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    assert info.decoded_vocab == [tokenizer.base.token_bytes(i) for i in range(len(tokenizer))]
    assert info.stop_token_ids == [tokenizer.eos_token_id]
    schema = json.dumps({"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"]})
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(schema)
    matcher = xgrammar.GrammarMatcher(grammar)
    assert all(matcher.accept_token(i) for i in tokenizer.encode('{"é": 12}'))
    assert not matcher.accept_token(tokenizer.encode("x")[0])
    assert matcher.accept_token(tokenizer.eos_token_id)


def test_a_directory_without_a_tokenizer_is_refused_by_name(tmp_path, tokenizer):
    root = Path(__file__).parents[2] / "models/k31-tiny"
    (tmp_path / "config.json").write_text((root / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"tiktoken\.model"):
        LongspanTokenizer.from_pretrained(tmp_path)

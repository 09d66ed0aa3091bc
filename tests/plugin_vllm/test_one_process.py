"""vLLM on one process gives the embedded engine's answers, whatever it does with the work."""

from __future__ import annotations

from support.cluster_cases import assert_same, embedded_answers, make_prompts


def test_prompts_of_all_lengths_in_one_batch(vllm, checkpoint) -> None:
    prompts = make_prompts(1, 2, 15, 16, 17, 63, 64, 65, 200)
    assert_same(vllm(prompts).answers[0], embedded_answers(checkpoint, prompts))


def test_prompts_in_chunks_beside_decoding(vllm, checkpoint) -> None:
    prompts = make_prompts(3, 150, 333, 40, 97)
    got = vllm(prompts, max_num_batched_tokens=64, max_num_seqs=3, block_size=16, async_scheduling=False)
    assert not got.asynchronous
    assert_same(got.answers[0], embedded_answers(checkpoint, prompts))


def test_prefix_hits_and_prefixes_of_others(vllm, checkpoint) -> None:
    first, tail, other = make_prompts(300, 40, 90)
    rounds = [
        [first],
        [first, first[:200] + tail, other],
        [first[:200] + tail, first[:64] + other, first + tail],
    ]
    got = vllm(*rounds, enable_prefix_caching=True, max_num_batched_tokens=96)
    assert got.cached[0] == [0]
    assert got.cached[1][0] > 0 and got.cached[2][2] > 0, "nothing came from the cache"
    for answers, prompts in zip(got.answers, rounds, strict=True):
        assert_same(answers, embedded_answers(checkpoint, prompts))


def test_sequences_that_lose_their_memory_and_start_again(vllm, checkpoint) -> None:
    prompts = make_prompts(60, 61, 62, 63, 64)
    for caching in (False, True):
        memory = {"max_model_len": 144, "block_size": 16, "num_gpu_blocks_override": 44}
        got = vllm(prompts, enable_prefix_caching=caching, max_tokens=60, **memory)
        assert got.preemptions > 0
        assert_same(got.answers[0], embedded_answers(checkpoint, prompts, max_tokens=60))


def test_steps_scheduled_ahead(vllm, checkpoint) -> None:
    prompts = make_prompts(5, 200, 33, 90)
    got = vllm(prompts, async_scheduling=True, max_num_batched_tokens=64)
    assert got.asynchronous
    assert_same(got.answers[0], embedded_answers(checkpoint, prompts))


def test_a_seed_draws_the_same_whatever_the_chunks(vllm) -> None:
    prompts = make_prompts(150, 40)
    whole = vllm(prompts, sampling_seed=7, max_num_batched_tokens=1024)
    assert_same(vllm(prompts, sampling_seed=7, max_num_batched_tokens=64).answers[0], whole.answers[0])

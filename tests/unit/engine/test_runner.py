from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from support.tiny_models import EOS, MAX_LEN, VOCAB
from transformers import AutoModelForCausalLM

from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling.sampler import Sampled, SampleRequest
from kvrelay.engine.sampling.sequence_faults import SegmentsFailed, SequenceFault
from kvrelay.engine.sequence_segment import Segment
from kvrelay.errors import ConfigError, InvalidArgument
from kvrelay.types.requests import SamplingParams

GREEDY = SamplingParams(temperature=0)
PROMPT = [9, 4, 77, 23, 5, 31, 8, 90, 11, 54]


@pytest.fixture(scope="module")
def runner(tiny_model: Callable[..., Path]) -> Iterator[ModelRunner]:
    runner = ModelRunner.load(str(tiny_model()), block_size=4, kv_bytes=1 << 20)
    yield runner
    runner.close()


def continued(
    runner: ModelRunner,
    token_ids: Sequence[int],
    n: int,
    params: SamplingParams,
    blocks: Sequence[int] = range(40),
) -> list[int]:
    """`token_ids`, computed from the start, and `n` more tokens."""
    tokens, computed = list(token_ids), 0
    for _ in range(n):
        request = SampleRequest(params, tokens, len(PROMPT))
        ((sampled,),) = runner.run([Segment(tokens[computed:], computed, blocks, request)])
        computed = len(tokens)
        tokens.append(sampled.token_id)
    return tokens


def test_what_a_runner_says_of_itself(runner: ModelRunner) -> None:
    assert runner.layout.block_size == 4
    assert runner.layout.dtype == "float32"
    assert runner.num_blocks == (1 << 20) // runner.layout.block_bytes == runner.kv.num_blocks
    assert runner.kv_bytes == runner.num_blocks * runner.layout.block_bytes == len(runner.kv.buffer)
    assert runner.max_model_len == MAX_LEN
    assert runner.vocab_size == VOCAB
    assert runner.eos_token_ids == {EOS}
    assert runner.layout_hash == runner.layout.hash(runner.model_id)


def test_chunks_without_sampling_give_nothing(runner: ModelRunner) -> None:
    segments = [Segment(PROMPT, 0, [0, 1, 2]), Segment(PROMPT[:3], 0, [5])]
    assert runner.run(segments) == [[], []]
    assert runner.run([]) == []


def test_sequences_that_share_blocks_of_a_prefix(runner: ModelRunner) -> None:
    expected = [continued(runner, [*PROMPT[:8], *tail], 3, GREEDY)[-3:] for tail in ([3, 4], [60])]
    runner.run([Segment(PROMPT[:8], 0, [20, 21])])
    first, second = [*PROMPT[:8], 3, 4], [*PROMPT[:8], 60]
    sampled = runner.run(
        [
            Segment([3, 4], 8, [20, 21, 22], SampleRequest(GREEDY, first, 8)),
            Segment([60], 8, [20, 21, 23], SampleRequest(GREEDY, second, 8)),
        ]
    )
    assert [one.token_id for (one,) in sampled] == [tokens[0] for tokens in expected]


@pytest.mark.parametrize("lost_at", [0, 1, 7])
def test_a_sequence_resumed_elsewhere_goes_on_as_it_would_have(
    runner: ModelRunner, tiny_model: Callable[..., Path], lost_at: int
) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=42, presence_penalty=0.2)
    unfaulted = continued(runner, PROMPT, 12, params)
    assert unfaulted != continued(runner, PROMPT, 12, SamplingParams(seed=43))
    other = ModelRunner.load(str(tiny_model()), block_size=8, kv_bytes=1 << 20)
    survived = unfaulted[: len(PROMPT) + lost_at]
    assert (
        continued(other, survived, 12 - lost_at, params, blocks=list(range(30, 0, -1))) == unfaulted
    )


def test_tokens_do_not_depend_on_who_else_is_in_the_batch(runner: ModelRunner) -> None:
    params = [SamplingParams(seed=seed, temperature=0.9) for seed in range(4)]
    prompts = [PROMPT, PROMPT[2:7], PROMPT * 3, PROMPT[:1]]
    tables = [range(i * 10, i * 10 + 10) for i in range(4)]
    segments = [
        Segment(prompt, 0, table, SampleRequest(p, prompt, len(prompt)))
        for prompt, table, p in zip(prompts, tables, params, strict=True)
    ]
    assert runner.run(segments) == [runner.run([segment])[0] for segment in segments]


SPECULATED = [
    GREEDY,
    SamplingParams(
        seed=7, temperature=1.1, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.4
    ),
    SamplingParams(seed=8, presence_penalty=0.8, logit_bias=((5, 3.0),), min_tokens=9, logprobs=2),
]


@pytest.mark.parametrize("params", SPECULATED)
@pytest.mark.parametrize("right", [0, 1, 3, 5])
def test_what_follows_right_drafts_is_what_plain_decoding_draws(
    runner: ModelRunner, params: SamplingParams, right: int
) -> None:
    """Also in the steps after: what a wrong draft left in the blocks is written over."""
    expected = continued(runner, PROMPT, 24, params)
    tokens = expected[: len(PROMPT) + 1]
    runner.run([Segment(PROMPT, 0, range(50, 90))])
    while len(tokens) < len(expected) - 6:
        start = len(tokens) - 1
        draft = expected[len(tokens) : len(tokens) + 5]
        draft[right:] = [(token + 1) % VOCAB for token in draft[right:]]
        request = SampleRequest(params, tokens + draft, len(PROMPT))
        segment = Segment(
            [*tokens[start:], *draft], start, range(50, 90), request, num_draft=len(draft)
        )
        _, sampled = runner.run([Segment(PROMPT, 0, range(40, 50)), segment])
        assert len(sampled) == right + 1
        tokens += [one.token_id for one in sampled]
        assert tokens == expected[: len(tokens)]


def test_logprobs_equal_those_of_transformers(
    runner: ModelRunner, tiny_model: Callable[..., Path]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    request = SampleRequest(SamplingParams(temperature=0, logprobs=5), PROMPT, len(PROMPT))
    ((sampled,),) = runner.run([Segment(PROMPT, 0, [2, 9, 4], request)])
    assert sampled.logprobs is not None
    tokens, values = zip(*sampled.logprobs.top, strict=True)
    assert list(tokens) == expected.topk(5).indices.tolist()
    torch.testing.assert_close(torch.tensor(values), expected.topk(5).values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(tiny_model: Callable[..., Path], dtype: str) -> None:
    runner = ModelRunner.load(str(tiny_model()), dtype=dtype, block_size=4, kv_bytes=1 << 20)
    assert runner.layout.dtype == dtype
    straight = continued(runner, PROMPT, 5, GREEDY)
    assert continued(runner, PROMPT, 5, GREEDY, blocks=[7, 3, 9, 1]) == straight


def test_too_little_memory_says_what_to_set(tiny_model: Callable[..., Path]) -> None:
    folder = str(tiny_model())
    with pytest.raises(
        ConfigError,
        match=r"kv.memory: 10000 bytes .* at least that, or "
        r"model.max_model_len",
    ) as caught:
        ModelRunner.load(folder, block_size=16, kv_bytes=10_000)
    words = caught.value.message.split()
    needed = int(words[words.index("takes") + 1])
    fitting = int(words[-1])
    assert 0 < fitting < MAX_LEN
    assert ModelRunner.load(folder, block_size=16, kv_bytes=needed).max_model_len == MAX_LEN
    assert (
        ModelRunner.load(
            folder, block_size=16, kv_bytes=10_000, max_model_len=fitting
        ).max_model_len
        == fitting
    )
    with pytest.raises(ConfigError):
        ModelRunner.load(folder, block_size=16, kv_bytes=needed - 1)
    with pytest.raises(ConfigError):
        ModelRunner.load(folder, block_size=16, kv_bytes=10_000, max_model_len=fitting + 1)


def test_max_model_len_is_cut_to_what_the_model_allows(tiny_model: Callable[..., Path]) -> None:
    assert (
        ModelRunner.load(str(tiny_model()), kv_bytes=1 << 20, max_model_len=10**9).max_model_len
        == MAX_LEN
    )


def sampling(**kwargs: object) -> SampleRequest:
    return SampleRequest(SamplingParams(temperature=0, **kwargs), PROMPT, len(PROMPT))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Segment([], 0, [0]), "empty"),
        (Segment([1], -1, [0]), "outside of 0 to 192"),
        (Segment([1, 1], MAX_LEN - 1, range(60)), "outside of 0 to 192"),
        (Segment([VOCAB], 0, [0]), "token id is outside of 0 to 127"),
        (Segment([5, -1], 0, [0]), "token id is outside of 0 to 127"),
        (Segment([5] * 5, 0, [0]), "5 tokens need 2 blocks, and the block table has 1"),
        (Segment([5], 0, [10**6]), "block number is outside"),
        (Segment([5], 0, [-1]), "block number is outside"),
    ],
)
def test_bad_segments_are_refused_before_anything_of_them_is_computed(
    runner: ModelRunner, segment: Segment, message: str
) -> None:
    good = Segment(PROMPT, 0, range(20, 23), sampling(logprobs=2))
    (alone,) = runner.run([good])
    before = runner.kv.buffer.clone()
    with pytest.raises(SegmentsFailed, match=message) as failed:
        runner.run([segment, good, segment])
    first, others, last = failed.value.outcomes
    assert others == alone, "the others of its step get what they get without it"
    assert isinstance(first, InvalidArgument)
    assert isinstance(last, InvalidArgument)
    assert torch.equal(runner.kv.buffer, before), "the good one's KV is what it was"


def test_sampling_that_is_not_allowed_fails_its_segment_alone(runner: ModelRunner) -> None:
    good, bad = (
        Segment(PROMPT, 0, range(at, at + 3), sampling(logit_bias=bias))
        for at, bias in ((20, ()), (30, ((VOCAB, 1.0),)))
    )
    (alone,) = runner.run([good])
    with pytest.raises(SegmentsFailed, match=r'logit_bias\["128"\] .*0 to 127') as failed:
        runner.run([bad, good])
    assert failed.value.outcomes[1] == alone
    assert isinstance(failed.value.outcomes[0], InvalidArgument)


def test_tokens_before_a_draft_that_cannot_be_drawn_stand() -> None:
    """As if the draft before it had been wrong: the next step tells of the fault, as plain decoding
    does.
    """
    fault = SequenceFault("no distribution")
    segment = Segment([5, 6, 7], 10, [0], sampling(), num_draft=2)
    right, second, third, wrong = (Sampled(token_id) for token_id in (6, 7, 9, 3))
    assert segment.accepted([right, second, third]) == [right, second, third]
    assert segment.accepted([right, fault, third]) == [right]
    assert segment.accepted([right, second, fault]) == [right, second]
    assert segment.accepted([wrong, fault, fault]) == [wrong]
    assert segment.accepted([fault, second, third]) is fault

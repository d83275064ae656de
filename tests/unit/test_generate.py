"""Generation: greedy equals an argmax loop, sampling obeys its settings, errors are clear."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from matrixtitan.checkpoint import CorruptCheckpointError
from matrixtitan.data.tokenizer import load_tokenizer, write_ranks
from matrixtitan.export import StoredModel, Weights, open_weights, write_matrixtitan
from matrixtitan.tools.generate import generate, load_model, main
from models.llama import LLAMA3_FLAVORS, Llama, LlamaFlavor

FLAVOR = LlamaFlavor(32, 2, 4, 2, 64)
CPU = torch.device("cpu")


def net_of(flavor: LlamaFlavor, vocab_size: int, max_seq_len: int) -> tuple[StoredModel, Llama]:
    """Weights large enough that the likeliest token changes from place to place."""
    model = StoredModel(flavor, vocab_size, max_seq_len, tie_embeddings=False, tokenizer_path="")
    net = model.build()
    net.init_weights(seed=2)
    with torch.no_grad():
        for number, param in enumerate(net.parameters()):
            param.add_(
                torch.randn(param.shape, generator=torch.Generator().manual_seed(number)) * 0.3
            )
    return model, net


@pytest.fixture(scope="module")
def net() -> Llama:
    return net_of(FLAVOR, vocab_size=40, max_seq_len=16)[1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model for the embedded tokenizer."""
    model, net = net_of(LLAMA3_FLAVORS["netlab"], load_tokenizer().n_words, max_seq_len=32)
    values = {fqn: param.detach() for fqn, param in net.named_parameters()}
    weights = Weights(model, dict.fromkeys(values, torch.float32), values.__getitem__)
    path = tmp_path_factory.mktemp("run") / "checkpoint"
    write_matrixtitan(weights, path)
    return path


def sample(net: Llama, prompt: list[int], count: int = 12, **settings: float) -> list[int]:
    return list(generate(net, prompt, max_new_tokens=count, **settings))  # type: ignore[arg-type]


@torch.no_grad()
def argmax_loop(net: Llama, prompt: list[int], count: int) -> list[int]:
    tokens = torch.tensor([prompt])
    for _ in range(count):
        likeliest = net(tokens)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, likeliest), dim=1)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("prompt", [[3], [7, 1, 30], [39, 0, 39, 5]])
def test_greedy_is_an_argmax_loop(net: Llama, prompt: list[int]) -> None:
    tokens = sample(net, prompt, temperature=0.0)
    assert tokens == argmax_loop(net, prompt, 12)
    assert len(set(tokens)) > 3  # a loop on one token would hide mistakes


def test_top_1_is_greedy_at_any_temperature(net: Llama) -> None:
    assert sample(net, [7], temperature=5.0, top_k=1) == sample(net, [7], temperature=0.0)


@pytest.mark.parametrize("temperature", [1e-5, 1e-40, 5e-324])
def test_the_smallest_temperatures_are_greedy(net: Llama, temperature: float) -> None:
    assert sample(net, [7], temperature=temperature) == sample(net, [7], temperature=0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_finite_are_named(temperature: float) -> None:
    _, broken = net_of(FLAVOR, vocab_size=40, max_seq_len=16)
    with torch.no_grad():
        broken.tok_embeddings.weight[7, 0] = torch.nan
    with pytest.raises(ValueError, match="output is not finite: its weights"):
        sample(broken, [7], temperature=temperature)


def test_seed_decides_the_samples(net: Llama) -> None:
    first = sample(net, [7], temperature=1.0, seed=1)
    assert sample(net, [7], temperature=1.0, seed=1) == first
    assert sample(net, [7], temperature=1.0, seed=2) != first


@torch.no_grad()
def test_samples_follow_the_tempered_probabilities(net: Llama) -> None:
    """2,000 draws of a token: frequencies within 4 standard deviations, none outside the top 5."""
    count, temperature = 2000, 1.5
    logits = net(torch.tensor([[7, 1]]))[0, -1]
    best = logits.topk(5)
    expected = torch.zeros(40).scatter(0, best.indices, (best.values / temperature).softmax(-1))
    drawn = torch.zeros(40)
    for seed in range(count):
        drawn[sample(net, [7, 1], 1, temperature=temperature, top_k=5, seed=seed)[0]] += 1
    assert drawn[expected == 0].sum() == 0
    deviation = (expected * (1 - expected) / count).sqrt()
    assert ((drawn / count - expected).abs() <= 4 * deviation).all()


def test_the_window_slides_past_the_models_length(net: Llama) -> None:
    prompt = list(range(14))
    tokens = sample(net, prompt, 8, temperature=0.0)
    assert tokens[:3] == argmax_loop(net, prompt, 3)  # up to 16 tokens: the model's whole length
    everything = prompt + tokens
    assert tokens[-1:] == argmax_loop(net, everything[-17:-1], 1)


def test_the_end_of_a_text_stops(net: Llama) -> None:
    tokens = sample(net, [7], temperature=0.0)
    end = tokens[4]
    stopped = sample(net, [7], temperature=0.0, eos_id=end)
    assert stopped == tokens[: tokens.index(end)]


def test_text_from_a_checkpoint_is_the_greedy_one(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--prompt", "def ", "--max-new-tokens", "8", "--temperature", "0"]
    main(["--checkpoint", str(checkpoint), *arguments])
    tokenizer = load_tokenizer()
    net = load_model(open_weights(checkpoint), CPU, torch.float32)
    prompt = tokenizer.encode("def ", bos=True)
    expected = tokenizer.decode(prompt[1:] + argmax_loop(net, prompt, 8))
    assert capsys.readouterr().out == f"{expected}\n"
    main(["--checkpoint", str(checkpoint), "--step", "0", *arguments])
    assert capsys.readouterr().out == f"{expected}\n"


def test_a_checkpoint_s_tokenizer_pattern_is_the_one_that_prompts_are_split_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ranks(tmp_path / "ranks", [*(bytes([byte]) for byte in range(256)), b"12", b"123"])
    model, net = net_of(FLAVOR, vocab_size=260, max_seq_len=32)
    model = replace(model, tokenizer_path=str(tmp_path / "ranks"), tokenizer_pattern="qwen2")
    values = {fqn: param.detach() for fqn, param in net.named_parameters()}
    weights = Weights(model, dict.fromkeys(values, torch.float32), values.__getitem__)
    write_matrixtitan(weights, tmp_path / "run")
    arguments = ["--checkpoint", str(tmp_path / "run"), "--prompt", "123"]
    arguments += ["--max-new-tokens", "8", "--temperature", "0"]
    texts = {}
    for pattern, prompt in (("qwen2", [258, 49, 50, 51]), ("llama3", [258, 257])):
        new = argmax_loop(net, prompt, 8)
        texts[pattern] = load_tokenizer(str(tmp_path / "ranks"), pattern).decode(prompt[1:] + new)
    assert texts["qwen2"] != texts["llama3"]
    main(arguments)
    assert capsys.readouterr().out == f"{texts['qwen2']}\n"
    main([*arguments, "--tokenizer-pattern", "llama3"])
    assert capsys.readouterr().out == f"{texts['llama3']}\n"
    with pytest.raises(SystemExit, match="nothing says how it splits text"):
        main([*arguments, "--tokenizer", str(tmp_path / "ranks")])


def test_weights_are_those_of_the_checkpoint(checkpoint: Path) -> None:
    _, net = net_of(LLAMA3_FLAVORS["netlab"], load_tokenizer().n_words, max_seq_len=32)
    loaded = load_model(open_weights(checkpoint), CPU, torch.float32)
    tokens = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(loaded(tokens), net(tokens))  # the rotary table too
    rounded = load_model(open_weights(checkpoint), CPU, torch.bfloat16)
    assert {param.dtype for param in rounded.parameters()} == {torch.bfloat16}


def test_damage_is_noticed(checkpoint: Path) -> None:
    path = min((checkpoint / "step-0").glob("*.distcp"))
    sound = path.read_bytes()
    path.write_bytes(sound[:-100] + bytes([sound[-100] ^ 1]) + sound[-99:])
    try:
        with pytest.raises(CorruptCheckpointError, match=path.name):
            load_model(open_weights(checkpoint), CPU, torch.float32)
        with pytest.raises(SystemExit, match="damaged"):
            main(["--checkpoint", str(checkpoint)])
    finally:
        path.write_bytes(sound)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "--temperature must be at least 0"),
        (["--temperature", "nan"], "--temperature must be at least 0"),
        (["--temperature", "inf"], "--temperature must be .* at most 1e"),
        (["--top-k", "-1"], "--top-k must be at least 0"),
        (["--seed", "9" * 30], "--seed must be .* at most 1e"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--step", "5"], "no complete checkpoint"),
        (["--tokenizer", "/gone/ranks"], "no file '/gone/ranks'"),
        (["--device", "abacus"], "--device"),
        (["--device", "meta"], "--device 'meta' cannot be used"),
    ],
)
def test_wrong_arguments_end_with_a_message(
    arguments: list[str], message: str, checkpoint: Path
) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["--checkpoint", str(checkpoint), *arguments])


def test_a_missing_checkpoint_ends_with_a_message(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nowhere does not exist"):
        main(["--checkpoint", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit, match="no checkpoint at"):
        main(["--checkpoint", str(tmp_path)])

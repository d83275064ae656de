"""Llama shapes for tests of the plan, made without torch."""

from __future__ import annotations

from matrixtitan.plan.shard import ParamSpec, Role


def llama_specs(
    dim: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int
) -> list[ParamSpec]:
    """ParamSpecs of an untied Llama.

    The units are the embedding, each block, and the norm with the head.
    """
    head_dim = dim // heads

    def spec(fqn: str, shape: tuple[int, ...], role: Role, unit: str) -> ParamSpec:
        return ParamSpec(fqn, shape, role, unit, shape[0] if role == "matrix" else 1)

    specs = [spec("tok_embeddings.weight", (vocab, dim), "tail", "tok_embeddings")]
    for layer in range(layers):
        unit = f"layers.{layer}"
        matrices = {
            "attention.wq": (heads * head_dim, dim),
            "attention.wk": (kv_heads * head_dim, dim),
            "attention.wv": (kv_heads * head_dim, dim),
            "attention.wo": (dim, heads * head_dim),
            "feed_forward.w1": (ffn, dim),
            "feed_forward.w2": (dim, ffn),
            "feed_forward.w3": (ffn, dim),
        }
        for name, shape in matrices.items():
            specs.append(spec(f"{unit}.{name}.weight", shape, "matrix", unit))
        for name in ("attention_norm", "ffn_norm"):
            specs.append(spec(f"{unit}.{name}.weight", (dim,), "tail", unit))
    specs.append(spec("head.norm.weight", (dim,), "tail", "head"))
    specs.append(spec("head.output.weight", (vocab, dim), "tail", "head"))
    return specs


LLAMA_8B = {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256}
LLAMA_405B = {
    "dim": 16384,
    "layers": 126,
    "heads": 128,
    "kv_heads": 8,
    "ffn": 53248,
    "vocab": 128256,
}

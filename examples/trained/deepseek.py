"""DeepSeek V3.2's layers in plain PyTorch, MLA and lightning indexer: small in all that no kernel fixes.

Names of parameters are those of a checkpoint of `DeepseekV32ForCausalLM`, so `state_dict` is one.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPS = 1e-6
LATENT, ROPE, NOPE, VALUE, INDEX_DIM = 512, 64, 128, 128, 128
SAME = 8  # first dims of the embedding, at first the same for all tokens


@dataclass(frozen=True)
class Config:
    vocabulary: int = 4096
    hidden: int = 512
    layers: int = 6
    heads: int = 8
    q_rank: int = 512
    mlp: int = 1024
    index_heads: int = 32
    topk: int = 2048
    max_length: int = 20480

    def as_json(self) -> str:
        """config.json, as vLLM and SGLang read it."""
        config = {
            "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
            "torch_dtype": "bfloat16", "vocab_size": self.vocabulary, "hidden_size": self.hidden,
            "intermediate_size": self.mlp, "moe_intermediate_size": 512, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.heads, "n_shared_experts": 1,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_layer_freq": 1,
            "first_k_dense_replace": 1000, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 1.0,
            "kv_lora_rank": LATENT, "q_lora_rank": self.q_rank, "qk_rope_head_dim": ROPE,
            "qk_nope_head_dim": NOPE, "v_head_dim": VALUE, "index_n_heads": self.index_heads,
            "index_head_dim": INDEX_DIM, "index_topk": self.topk, "hidden_act": "silu",
            "max_position_embeddings": self.max_length, "rms_norm_eps": EPS, "rope_theta": 10000,
            "tie_word_embeddings": False, "attention_bias": False, "num_nextn_predict_layers": 0,
            "bos_token_id": 256, "eos_token_id": 257, "initializer_range": 0.02, "use_cache": True,
        }  # fmt: skip
        return json.dumps(config, indent=1)


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), EPS)


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def frequencies() -> Tensor:
    return 10000.0 ** (-torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE)


def rotate(x: Tensor, angles: Tensor, *, halves: bool) -> Tensor:
    """The first 64 dims of x [batch, length, heads, dims], as pairs of neighbours or of halves."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    turned, rest = x.float().split([ROPE, x.shape[-1] - ROPE], -1)
    if halves:
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([turned, rest], -1).to(x.dtype)


class Indexer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.index_heads
        self.wq_b = linear(c.q_rank, c.index_heads * INDEX_DIM)
        self.wk = linear(c.hidden, INDEX_DIM)
        self.k_norm = nn.LayerNorm(INDEX_DIM, eps=EPS)
        self.weights_proj = linear(c.hidden, c.index_heads)

    def forward(self, x: Tensor, q_a: Tensor, angles: Tensor, rows: Tensor) -> Tensor:
        """Logits [batch, rows, length] of queries at positions ``rows``; -inf for what comes later."""
        q = rotate(self.wq_b(q_a[:, rows]).unflatten(-1, (self.heads, -1)), angles[rows], halves=True)
        k = rotate(self.k_norm(self.wk(x))[:, :, None], angles, halves=True)[:, :, 0]
        weights = (self.weights_proj(x[:, rows]).float() * (self.heads * INDEX_DIM) ** -0.5).mT[..., None]
        logits = torch.zeros(len(x), len(rows), x.shape[1], device=x.device)
        for first in range(0, self.heads, 8):  # memory
            some = slice(first, first + 8)
            products = torch.einsum("bqhd,bnd->bhqn", q[:, :, some], k).relu()
            logits = logits + (products * weights[:, some]).sum(1)
        later = torch.arange(x.shape[1], device=x.device) > rows[:, None]
        return logits.masked_fill(later, float("-inf"))


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.topk = c.heads, c.topk
        self.q_a_proj, self.q_a_layernorm = linear(c.hidden, c.q_rank), RMSNorm(c.q_rank)
        self.q_b_proj = linear(c.q_rank, c.heads * (NOPE + ROPE))
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = linear(c.hidden, LATENT + ROPE), RMSNorm(LATENT)
        self.kv_b_proj = linear(LATENT, c.heads * (NOPE + VALUE))
        self.o_proj = linear(c.heads * VALUE, c.hidden)
        self.indexer = Indexer(c)

    def forward(
        self, x: Tensor, angles: Tensor, *, sparse: bool, rows: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and how far the indexer is from what attention looks at, of queries at ``rows``."""
        q_a = self.q_a_layernorm(self.q_a_proj(x))
        q_nope, q_pe = self.q_b_proj(q_a).unflatten(-1, (self.heads, -1)).split([NOPE, ROPE], -1)
        latent, k_pe = self.kv_a_proj_with_mqa(x).split([LATENT, ROPE], -1)
        k_nope, v = (
            self.kv_b_proj(self.kv_a_layernorm(latent))
            .unflatten(-1, (self.heads, -1))
            .split([NOPE, VALUE], -1)
        )
        k_pe = rotate(k_pe[:, :, None], angles, halves=False).expand(-1, -1, self.heads, -1)
        q = torch.cat([q_nope, rotate(q_pe, angles, halves=False)], -1).transpose(1, 2)
        k, v = torch.cat([k_nope, k_pe], -1).transpose(1, 2), v.transpose(1, 2)
        mask = self.chosen(x, q_a, angles) if sparse and x.shape[1] > self.topk else None
        v = F.pad(v, (0, NOPE + ROPE - VALUE))  # one size of heads, as fast kernels want
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)[..., :VALUE]
        distance = None
        if rows is not None:
            distance = self.distance(x.detach(), q_a.detach(), q.detach(), k.detach(), angles, rows)
        return self.o_proj(out.transpose(1, 2).flatten(2)), distance

    @torch.no_grad()
    def chosen(self, x: Tensor, q_a: Tensor, angles: Tensor) -> Tensor:
        """[batch, 1, length, length]: the indexer's best of each query."""
        length = x.shape[1]
        mask = torch.zeros(len(x), 1, length, length, dtype=torch.bool, device=x.device)
        every = torch.arange(length, device=x.device)
        for rows, part in zip(every.split(512), mask[:, 0].split(512, 1), strict=True):
            best = self.indexer(x, q_a, angles, rows).topk(self.topk, -1, sorted=False)
            part.scatter_(-1, best.indices, best.values > float("-inf"))
        return mask

    def distance(self, x: Tensor, q_a: Tensor, q: Tensor, k: Tensor, angles: Tensor, rows: Tensor) -> Tensor:
        """Kullback-Leibler, from the mean of all heads' attention to the indexer's softmax."""
        with torch.no_grad():
            logits = (q[:, :, rows] @ k.mT).float() * (NOPE + ROPE) ** -0.5
            later = torch.arange(x.shape[1], device=x.device) > rows[:, None]
            target = logits.masked_fill(later, float("-inf")).softmax(-1).mean(1)
        with torch.enable_grad():
            found = self.indexer(x, q_a, angles, rows).log_softmax(-1)
            each = target * (target.clamp_min(1e-9).log() - found.masked_fill(later, 0))
            return each.sum(-1).mean()

    @torch.no_grad()
    def look_back(self, same: Tensor) -> None:
        """Half of the heads begin with attention to the token before. ``same`` [hidden] is in every input.

        From it come keys and queries whose rotated pairs are the same for all tokens, the queries' one
        position back. Slow pairs are left out: they do not tell neighbours apart.
        """
        size, fast = 8.0, frequencies()[: ROPE // 6].float()
        self.kv_a_proj_with_mqa.weight[LATENT:][0 : 2 * len(fast) : 2] += size * same / same.dot(same)
        compressed = self.q_a_proj.weight @ same
        compressed = size * compressed / compressed.dot(compressed)
        heads = self.q_b_proj.weight.view(self.heads, NOPE + ROPE, -1)[: (self.heads + 1) // 2, NOPE:]
        heads[:, 0 : 2 * len(fast) : 2] += torch.outer(fast.cos(), compressed)
        heads[:, 1 : 2 * len(fast) : 2] -= torch.outer(fast.sin(), compressed)


class MLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(c.hidden, c.mlp), linear(c.hidden, c.mlp)
        self.down_proj = linear(c.mlp, c.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(c.hidden), Attention(c)
        self.post_attention_layernorm, self.mlp = RMSNorm(c.hidden), MLP(c)
        for projection in (self.self_attn.o_proj, self.mlp.down_proj):
            projection.weight.data /= (2 * c.layers) ** 0.5


class Body(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocabulary, c.hidden)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.hidden)


class Model(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config, self.model = c, Body(c)
        self.lm_head = linear(c.hidden, c.vocabulary)
        # A copied token is likely from the beginning on.
        self.lm_head.weight.data = 0.3 * c.hidden**-0.5 * self.model.embed_tokens.weight.data.clone()
        # So does a token know the one before it: copying needs both.
        same = torch.zeros(c.hidden)
        same[:SAME] = 4
        self.model.embed_tokens.weight.data[:, :SAME] = 0
        self.model.embed_tokens.weight.data += same
        size = (1 + SAME * (same[0] ** 2 - 1) / c.hidden).sqrt()
        self.model.layers[0].self_attn.look_back(same / size)
        angles = (torch.arange(c.max_length, dtype=torch.float64)[:, None] * frequencies()).float()
        self.register_buffer("angles", angles, persistent=False)

    def forward(
        self, tokens: Tensor, at: Tensor, *, sparse: bool = False, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits of the next token at places [n, 2] (text, position), and the indexers' mean distance."""
        x, angles = self.model.embed_tokens(tokens), self.angles[: tokens.shape[1]]
        distances = []
        for layer in self.model.layers:
            out, distance = layer.self_attn(layer.input_layernorm(x), angles, sparse=sparse, rows=rows)
            distances += [] if distance is None else [distance]
            x = x + out
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        x = self.model.norm(x[at[:, 0], at[:, 1]])
        with torch.enable_grad():  # the indexers' own; see Attention.distance
            distance = torch.stack(distances).mean() if distances else x.new_zeros(())
        return self.lm_head(x), distance

    def indexer_parameters(self) -> list[nn.Parameter]:
        return [p for name, p in self.named_parameters() if ".indexer." in name]


def save(model: Model, folder: Path) -> None:
    """A checkpoint that engines load, in bf16."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(model.config.as_json())
    state = {
        name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.state_dict().items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

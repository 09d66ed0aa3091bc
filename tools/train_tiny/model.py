"""A small Kimi K3.1 for training: batched, differentiable, published tensor names.

Parameter names are those of the published checkpoint without the `language_model.` prefix, except that
the routed experts of a layer are three stacked tensors `experts.w{1,2,3}` [E, out, in], which
`export.py` splits and packs. Matrix products run in `Config.compute_dtype`, everything that must be fp32
is. Formulas: KDA "Kimi Linear" (arXiv 2510.26692), DSA DeepSeek-V3.2, AttnRes and latent MoE as in K3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kda import kda_chunked
from .mxfp4 import fake_quantize


@dataclass
class Config:
    vocab_size: int = 2048
    hidden: int = 128
    layers: int = 8
    full_layers: tuple[int, ...] = (3, 7)  # 0-based
    kda_heads: int = 2
    kda_dim: int = 64
    conv: int = 4
    gate_lower_bound: float = -5.0
    heads: int = 4
    nope: int = 32
    rope: int = 32
    v_dim: int = 64
    q_lora: int = 64
    kv_lora: int = 64
    index_heads: int = 4
    index_dim: int = 32
    index_topk: int = 64
    dense_inter: int = 384
    experts: int = 16
    topk: int = 2
    latent: int = 64
    moe_inter: int = 96
    shared: int = 2
    res_block: int = 4
    eps: float = 1e-5
    lora_eps: float = 1e-6
    capacity: float = 1.5  # routed rows per expert in training, as a multiple of the mean
    compute_dtype: torch.dtype = field(default=torch.bfloat16)
    quantize: bool = True
    tied: bool = True  # lm_head is embed_tokens while training; the file has both


class IndexerOutput(NamedTuple):
    """What the indexer's loss needs of one DSA layer: mean KL per query, and the recall of attention mass."""

    kl: Tensor
    recall: Tensor


def linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype))


def rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps) * w).to(x.dtype)


def situ(gate: Tensor, up: Tensor) -> Tensor:
    g, u = gate.float(), up.float()
    return (4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)).to(gate.dtype)


def conv_silu(x: Tensor, w: Tensor) -> Tensor:
    """Depthwise causal convolution of x [B,T,P] with w [P,1,4] and SiLU, fp32 inside."""
    taps = w.shape[-1]
    padded = F.pad(x.float(), (0, 0, taps - 1, 0))
    y = sum(padded[:, j : j + x.shape[1]] * w[:, 0, j] for j in range(taps))
    return F.silu(y)


def weight(out: int, inp: int, scale: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(out, inp) * scale * inp**-0.5)


class Weight(nn.Module):
    """A named holder of one `weight` (and perhaps `bias`): state-dict names are the published ones."""

    def __init__(self, value: nn.Parameter, bias: nn.Parameter | None = None):
        super().__init__()
        self.weight = value
        if bias is not None:
            self.bias = bias


def mat(out: int, inp: int, scale: float = 1.0) -> Weight:
    return Weight(weight(out, inp, scale))


def ones(n: int) -> Weight:
    return Weight(nn.Parameter(torch.ones(n)))


class KdaAttention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c, p = c, c.kda_heads * c.kda_dim
        self.q_proj, self.k_proj, self.v_proj, self.g_proj = (mat(p, c.hidden) for _ in range(4))
        self.o_proj = mat(c.hidden, p, 0.5)
        self.b_proj = mat(c.kda_heads, c.hidden)
        self.f_a_proj, self.f_b_proj = mat(c.kda_dim, c.hidden), mat(p, c.kda_dim, 0.5)
        # Induction from the start: q matches k, and half of the channels of k hold the token before.
        self.k_proj.weight.data.copy_(self.q_proj.weight)
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            taps = torch.randn(p, 1, c.conv) * 0.1
            taps[:, 0, -1] += 1.0
            if name == "k_conv1d":
                taps[::2, 0, -2:] += torch.tensor([1.0, -1.0])
            setattr(self, name, Weight(nn.Parameter(taps)))
        self.A_log = nn.Parameter(torch.zeros(c.kda_heads))
        rate = (
            torch.exp(torch.empty(p).uniform_(-7.0, -0.5)) / -c.gate_lower_bound
        )  # half lives of 1 to 1000 tokens
        self.dt_bias = nn.Parameter(torch.log(rate) - torch.log1p(-rate))
        self.o_norm = ones(c.kda_dim)

    def forward(self, x: Tensor) -> Tensor:
        c, (b, t, _) = self.c, x.shape
        heads = lambda y: y.reshape(b, t, c.kda_heads, c.kda_dim).transpose(1, 2)  # noqa: E731
        q = heads(conv_silu(linear(x, self.q_proj.weight), self.q_conv1d.weight))
        k = heads(conv_silu(linear(x, self.k_proj.weight), self.k_conv1d.weight))
        v = heads(conv_silu(linear(x, self.v_proj.weight), self.v_conv1d.weight))
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * c.kda_dim**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        beta = torch.sigmoid(linear(x, self.b_proj.weight).float()).transpose(1, 2)
        z = linear(linear(x, self.f_a_proj.weight), self.f_b_proj.weight).float() + self.dt_bias
        g = c.gate_lower_bound * torch.sigmoid(self.A_log.exp()[:, None, None] * heads(z))
        o = kda_chunked(q, k, v, g, beta)
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + c.eps) * self.o_norm.weight
        o = o * torch.sigmoid(heads(linear(x, self.g_proj.weight)).float())
        return linear(o.transpose(1, 2).reshape(b, t, -1).to(x.dtype), self.o_proj.weight)


class Indexer(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.wq_b = mat(c.index_heads * c.index_dim, c.q_lora)
        self.wk = mat(c.index_dim, c.hidden)
        self.weights_proj = mat(c.index_heads, c.hidden)
        self.k_norm = Weight(nn.Parameter(torch.ones(c.index_dim)), nn.Parameter(torch.zeros(c.index_dim)))

    def forward(self, x: Tensor, q_latent: Tensor) -> Tensor:
        """Index scores [B,T,T], no causal mask."""
        c, (b, t, _) = self.c, x.shape
        q = linear(q_latent, self.wq_b.weight).reshape(b, t, c.index_heads, c.index_dim)
        k = linear(x, self.wk.weight).float()
        k = F.layer_norm(k, (c.index_dim,), self.k_norm.weight, self.k_norm.bias, c.eps).to(x.dtype)
        w = F.linear(x.float(), self.weights_proj.weight) * c.index_heads**-0.5 * c.index_dim**-0.5
        score = x.new_zeros(b, t, t, dtype=torch.float32)
        for h in range(c.index_heads):
            score = score + w[:, :, h, None] * F.relu((q[:, :, h] @ k.mT).float())
        return score


class DsaAttention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.q_a_proj, self.q_a_layernorm = mat(c.q_lora, c.hidden), ones(c.q_lora)
        self.q_b_proj = mat(c.heads * (c.nope + c.rope), c.q_lora)
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = mat(c.kv_lora + c.rope, c.hidden), ones(c.kv_lora)
        self.kv_b_proj = mat(c.heads * (c.nope + c.v_dim), c.kv_lora)
        self.g_proj = mat(c.heads * c.v_dim, c.hidden)
        self.o_proj = mat(c.hidden, c.heads * c.v_dim, 0.5)
        self.indexer = Indexer(c)
        if c.q_lora == c.kv_lora:  # like attends to like from the start
            self.q_a_proj.weight.data.copy_(self.kv_a_proj_with_mqa.weight[: c.kv_lora])
            keys = self.kv_b_proj.weight.reshape(c.heads, c.nope + c.v_dim, -1)[:, : c.nope]
            self.q_b_proj.weight.data.reshape(c.heads, c.nope + c.rope, -1)[:, : c.nope] = keys.detach()

    def forward(self, x: Tensor, mode: str, rows: Tensor | None) -> tuple[Tensor, IndexerOutput | None]:
        """mode: "dense", "warmup" (dense, the indexer learns the whole distribution) or "sparse".

        rows [R]: the query positions on which the indexer's KL is measured (a sample is enough, and cheap).
        """
        c, (b, t, _) = self.c, x.shape
        q_latent = rms(linear(x, self.q_a_proj.weight), self.q_a_layernorm.weight, c.lora_eps)
        q = linear(q_latent, self.q_b_proj.weight).reshape(b, t, c.heads, -1).transpose(1, 2)
        latent, k_shared = linear(x, self.kv_a_proj_with_mqa.weight).split([c.kv_lora, c.rope], -1)
        latent = rms(latent, self.kv_a_layernorm.weight, c.lora_eps)
        kv = linear(latent, self.kv_b_proj.weight).reshape(b, t, c.heads, -1).transpose(1, 2)
        k_own, v = kv.split([c.nope, c.v_dim], -1)
        k = torch.cat([k_own, k_shared[:, None].expand(b, c.heads, t, c.rope)], -1)
        scale = (c.nope + c.rope) ** -0.5
        causal = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        keep, index = causal, None
        if mode != "dense":
            score = self.indexer(x.detach(), q_latent.detach()).masked_fill(~causal, -torch.inf)
            if mode == "sparse" and t > c.index_topk:
                # By index, not by a threshold: scores may tie at 0, and the set must have topk keys.
                best = score.detach().topk(c.index_topk, -1, sorted=False).indices
                keep = torch.zeros_like(score, dtype=torch.bool).scatter(-1, best, True) & causal
        if mode != "dense" and rows is not None:
            index = self.indexer_loss(q.detach(), k.detach(), score, keep, causal, rows, scale)
        # Written out: compiled, it is four times as fast on a CPU as scaled_dot_product_attention.
        logits = (q @ k.mT).float() * scale
        a = logits.masked_fill(~keep.reshape(-1, 1, t, t), -torch.inf).softmax(-1).to(v.dtype)
        o = (a @ v).transpose(1, 2).reshape(b, t, -1)
        gate = torch.sigmoid(linear(x, self.g_proj.weight).float())
        return linear((o.float() * gate).to(x.dtype), self.o_proj.weight), index

    @staticmethod
    def indexer_loss(
        q: Tensor, k: Tensor, score: Tensor, keep: Tensor, causal: Tensor, rows: Tensor, scale: float
    ) -> IndexerOutput:
        """DeepSeek-V3.2 eq. 3 and 4: KL(attention, mean over heads || softmax of index scores)."""
        b, t = q.shape[0], q.shape[2]
        chosen = keep.expand(b, t, t)[:, rows]  # [B,R,T]
        visible = causal[rows].expand_as(chosen)
        logits = (q[:, :, rows] @ k.mT).float() * scale
        whole = logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1).mean(1)
        recall = (whole * chosen).sum(-1)
        target = whole if keep.dim() == 2 else whole * chosen
        target = target / (target.sum(-1, keepdim=True) + 1e-9)
        log_index = score[:, rows].masked_fill(~chosen, -torch.inf).log_softmax(-1).masked_fill(~chosen, 0.0)
        kl = torch.special.xlogy(target, target) - target * log_index
        return IndexerOutput(kl.sum(-1).mean(), recall.mean())


class Mlp(nn.Module):
    def __init__(self, hidden: int, inter: int):
        super().__init__()
        self.gate_proj, self.up_proj = mat(inter, hidden), mat(inter, hidden)
        self.down_proj = mat(hidden, inter, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return linear(
            situ(linear(x, self.gate_proj.weight), linear(x, self.up_proj.weight)), self.down_proj.weight
        )


class Router(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.weight = weight(c.experts, c.hidden)
        self.register_buffer("e_score_correction_bias", torch.zeros(c.experts))


class Experts(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        stack = lambda out, inp: nn.Parameter(torch.randn(c.experts, out, inp) * inp**-0.5)  # noqa: E731
        self.w1, self.w3 = stack(c.moe_inter, c.latent), stack(c.moe_inter, c.latent)
        self.w2 = stack(c.latent, c.moe_inter)


class LatentMoe(nn.Module):
    """Latent MoE. In training every expert has one capacity, for static shapes; rows beyond are dropped."""

    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.gate = Router(c)
        self.experts = Experts(c)
        self.routed_expert_down_proj = mat(c.latent, c.hidden)
        self.routed_expert_norm = ones(c.latent)
        self.routed_expert_up_proj = mat(c.hidden, c.latent, 0.5)
        self.shared_experts = Mlp(c.hidden, c.shared * c.moe_inter)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Gives the output and the number of rows each expert was asked for [E]."""
        c, shape = self.c, x.shape
        x = x.reshape(-1, c.hidden)
        n = x.shape[0]
        s = torch.sigmoid(F.linear(x.float(), self.gate.weight))
        chosen = (s.detach() + self.gate.e_score_correction_bias).topk(c.topk, -1).indices
        w = s.gather(1, chosen)
        w = w / (w.sum(-1, keepdim=True) + 1e-20)
        flat = chosen.reshape(-1)
        hot = F.one_hot(flat, c.experts)
        place = (hot.cumsum(0) - 1).gather(1, flat[:, None])[:, 0]
        capacity = int(c.capacity * n * c.topk / c.experts) if c.capacity else n
        slot = torch.where(place < capacity, flat * capacity + place, c.experts * capacity)
        z = linear(x, self.routed_expert_down_proj.weight)
        token = torch.arange(n, device=x.device).repeat_interleave(c.topk)
        box = z.new_zeros(c.experts * capacity + 1, c.latent).index_copy(0, slot, z[token])
        box = box[:-1].reshape(c.experts, capacity, c.latent)
        quant = fake_quantize if c.quantize else (lambda m: m)
        w1, w2, w3 = (quant(m).to(x.dtype) for m in (self.experts.w1, self.experts.w2, self.experts.w3))
        y = (situ(box @ w1.mT, box @ w3.mT) @ w2.mT).reshape(-1, c.latent)
        y = torch.cat([y, y.new_zeros(1, c.latent)])[slot].reshape(n, c.topk, c.latent)
        r = (y.float() * w[:, :, None]).sum(1).to(x.dtype)
        y = linear(rms(r, self.routed_expert_norm.weight, c.eps), self.routed_expert_up_proj.weight)
        return (y + self.shared_experts(x)).reshape(shape), hot.sum(0)


class Layer(nn.Module):
    def __init__(self, c: Config, index: int):
        super().__init__()
        self.c, self.index = c, index
        self.input_layernorm, self.post_attention_layernorm = ones(c.hidden), ones(c.hidden)
        self.self_attention_res_norm, self.mlp_res_norm = ones(c.hidden), ones(c.hidden)
        self.self_attention_res_proj = Weight(nn.Parameter(torch.zeros(1, c.hidden)))
        self.mlp_res_proj = Weight(nn.Parameter(torch.zeros(1, c.hidden)))
        self.self_attn = DsaAttention(c) if index in c.full_layers else KdaAttention(c)
        if index == 0:
            self.mlp = Mlp(c.hidden, c.dense_inter)
        else:
            self.block_sparse_moe = LatentMoe(c)


def mix(p: Tensor, bank: list[Tensor], norm: Tensor, proj: Tensor, eps: float) -> Tensor:
    """AttnRes: softmax over sources of (n*w . rms(source)), weighting the raw sources."""
    nw = norm * proj[0]
    scores = []
    for s in [*bank, p]:
        f = s.float()
        scores.append((f * nw).sum(-1, keepdim=True) * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps))
    a = torch.cat(scores, -1).softmax(-1)
    return sum(a[..., j, None] * s.float() for j, s in enumerate([*bank, p])).to(p.dtype)


class Output(NamedTuple):
    hidden: Tensor  # [B,T,d], normalised, ready for the head
    index: list[IndexerOutput]
    load: Tensor  # rows asked of each expert [layers-1, E]


class Body(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.embed_tokens = Weight(nn.Parameter(torch.randn(c.vocab_size, c.hidden) * 0.1))
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.layers))
        self.norm, self.output_attn_res_norm = ones(c.hidden), ones(c.hidden)
        self.output_attn_res_proj = Weight(nn.Parameter(torch.zeros(1, c.hidden)))

    def forward(self, ids: Tensor, mode: str = "dense", rows: Tensor | None = None) -> Output:
        c = self.c
        p = F.embedding(ids, self.embed_tokens.weight).to(c.compute_dtype)
        bank: list[Tensor] = []
        index: list[IndexerOutput] = []
        load = []
        for i, layer in enumerate(self.layers):
            h = (
                mix(
                    p, bank, layer.self_attention_res_norm.weight, layer.self_attention_res_proj.weight, c.eps
                )
                if bank
                else p
            )
            opens = i % c.res_block == 0
            if opens:
                bank = [*bank, p]
            a = layer.self_attn
            x = rms(h, layer.input_layernorm.weight, c.eps)
            if i in c.full_layers:
                y, extra = a(x, mode, rows)
                index += [extra] if extra is not None else []
            else:
                y = a(x)
            p = y if opens else p + y
            h = mix(p, bank, layer.mlp_res_norm.weight, layer.mlp_res_proj.weight, c.eps)
            x = rms(h, layer.post_attention_layernorm.weight, c.eps)
            if i == 0:
                p = p + layer.mlp(x)
            else:
                y, asked = layer.block_sparse_moe(x)
                p = p + y
                load.append(asked)
        h = mix(p, bank, self.output_attn_res_norm.weight, self.output_attn_res_proj.weight, c.eps)
        return Output(rms(h, self.norm.weight, c.eps), index, torch.stack(load))


class TinyK31(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.model = Body(c)
        # Tied, so that a copied token finds its way out without learning the map of every token by itself.
        self.lm_head = Weight(self.model.embed_tokens.weight) if c.tied else mat(c.vocab_size, c.hidden)

    def forward(self, ids: Tensor, mode: str = "dense", rows: Tensor | None = None) -> Output:
        return self.model(ids, mode, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.lm_head.weight).float()

"""Models of Hugging Face transformers with attn_implementation="fovea": the logits and gradients of "eager"."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

import fovea.hf  # noqa: E402

SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    initializer_range=0.3,  # scores of a size that masks, caps and sinks change
)  # fmt: skip
CONFIGS = {
    "llama: grouped heads": lambda: transformers.LlamaConfig(**SMALL),
    "mistral: window": lambda: transformers.MistralConfig(**SMALL, sliding_window=5),
    "gemma2: softcap, window": lambda: transformers.Gemma2Config(
        **SMALL, sliding_window=5, attn_logit_softcapping=3.0, query_pre_attn_scalar=8
    ),
    "gemma3: norms of heads, few global layers": lambda: transformers.Gemma3TextConfig(
        **SMALL, sliding_window=5, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt_oss: sinks": lambda: transformers.GptOssConfig(
        **SMALL, sliding_window=5, num_local_experts=2, num_experts_per_tok=1
    ),
    "bert: bidirectional": lambda: transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    ),
}


def models(config, device):
    """The same weights twice."""
    fovea.hf.register()
    make = transformers.AutoModelForMaskedLM if config.model_type == "bert" else transformers.AutoModelForCausalLM
    mine, eager = (
        make.from_config(copy.deepcopy(config), attn_implementation=name).to(device).eval()
        for name in ("fovea", "eager")
    )
    assert (mine.config._attn_implementation, eager.config._attn_implementation) == ("fovea", "eager")
    mine.load_state_dict(eager.state_dict())
    return mine, eager


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("padded", [False, True])
def test_logits_and_gradients(device, name, padded):
    mine, eager = models(CONFIGS[name](), device)
    tokens = torch.randint(1, 64, (2, 12), device=device)
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :4] = 0  # at the left, as generation pads
    results = []
    for model in (mine, eager):
        logits = model(tokens, attention_mask=mask).logits
        logits = logits * mask[..., None]
        logits.square().mean().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


DECODERS = [name for name in CONFIGS if not name.startswith("bert")]


@pytest.mark.parametrize("name", DECODERS)
def test_prefill_in_chunks(device, name):
    """The past is in a cache: what was one call is three, the last of one token."""
    mine, eager = models(CONFIGS[name](), device)
    tokens = torch.randint(1, 64, (2, 12), device=device)
    expected = eager(tokens).logits
    cache, chunks = None, []
    with torch.no_grad():
        for chunk in tokens.split([7, 4, 1], dim=1):
            out = mine(chunk, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            chunks.append(out.logits)
    torch.testing.assert_close(torch.cat(chunks, 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_generation_with_a_cache(device, name, padded):
    """Beyond the window of those that have one."""
    mine, eager = models(CONFIGS[name](), device)
    tokens = torch.randint(1, 64, (2, 5), device=device)
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :3] = 0
    settings = dict(attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    expected = eager.generate(tokens, **settings)
    assert expected.shape == (2, 13)
    assert torch.equal(mine.generate(tokens, **settings), expected)


def test_generation_with_a_static_cache(device):
    mine, eager = models(CONFIGS["llama: grouped heads"](), device)
    tokens = torch.randint(1, 64, (2, 5), device=device)
    settings = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    static = mine.generate(tokens, cache_implementation="static", disable_compile=True, **settings)
    assert torch.equal(static, eager.generate(tokens, **settings))


def test_latent_attention_of_deepseek():
    """fovea.nn's layer loads the parameters of the model's, and gives the same, whole and token by token."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as published

    config = transformers.DeepseekV3Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=8,
        qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, max_position_embeddings=64,
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = published.DeepseekV3Attention(config, layer_idx=0).eval()
    mine = fovea.nn.LatentAttention.deepseek(
        32, 4, q_latent=12, kv_latent=8, nope_dim=6, rope_dim=4, v_dim=5, max_seq_len=16
    )
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 32)
    turns = published.DeepseekV3RotaryEmbedding(config)(x, torch.arange(9)[None])
    hidden = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        expected = theirs(x, turns, hidden)[0]
        torch.testing.assert_close(mine(x), expected, rtol=1e-4, atol=1e-4)
        cache = mine.make_cache(2)
        steps = torch.cat([mine(part, cache=cache) for part in x.split([5, 1, 3], dim=1)], 1)
    torch.testing.assert_close(steps, expected, rtol=1e-4, atol=1e-4)

"""A small transformer that is trained twice from the same seed, with fovea's attention and with torch's.

As a program it compares the loss curves of 10 million parameters on a GPU, fewer on a CPU, and times training steps and
calls beside torch's flash backend.
"""

import contextlib
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fovea

BACK = 3  # how many positions before it a token's target stands: what attention must learn
VOCABULARY = 32


class Attention(nn.Module):
    """Causal self-attention by any function with the meaning of torch's. Its parameters are named as those of
    fovea.nn.SelfAttention are."""

    def __init__(self, width, heads, function):
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.function = heads, function

    def forward(self, x):
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = self.function(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, attention):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), attention
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, width, layers, length, make_attention):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, make_attention()) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.token(tokens) + self.position(places)))


def loss_of(model, tokens):
    logits = model(tokens)[:, BACK:]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, :-BACK].flatten())


def models(width, heads, layers, length, device, variants):
    """One model of each variant of attention, with the same weights."""
    torch.manual_seed(0)
    made = [Transformer(width, layers, length, lambda v=v: v(width, heads)).to(device) for v in variants]
    for model in made[1:]:
        model.load_state_dict(made[0].state_dict())
    return made


def train(model, steps, batch, length, device, rate=3e-3, half=False):
    """The loss of each step."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (batch, length), device=device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=half):
            loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def torchs(width, heads):
    return Attention(width, heads, F.scaled_dot_product_attention)


def fovea_function(width, heads):
    return Attention(width, heads, fovea.scaled_dot_product_attention)


def fovea_layer(width, heads):
    return fovea.nn.SelfAttention(width, heads, causal=True)


# --- as a program -----------------------------------------------------------------------------------------------


def only_flash():
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


def finish(device):
    if device == "cuda":
        torch.cuda.synchronize()


def step_times(steppers, device, rounds=40):
    """The median and the least of each in ms; in every round one after the other, and back in the next."""
    pairs = [(stepper, []) for stepper in steppers]
    for turn in range(rounds + 3):
        for stepper, found in pairs[:: 1 if turn % 2 else -1]:
            finish(device)
            begin = time.perf_counter()
            stepper()
            finish(device)
            if turn >= 3:
                found.append(1e3 * (time.perf_counter() - begin))
    return [(sorted(found)[rounds // 2], min(found)) for _, found in pairs]


def as_graph(step):
    """What replays a step's work on the GPU, without the time that Python takes to queue it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def host_time(call, device, count=50, rounds=60):
    """The least time in us until a call returns, the GPU's work not awaited."""
    least = float("inf")
    for _ in range(rounds):
        finish(device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        least = min(least, (time.perf_counter() - begin) / count)
    return 1e6 * least


def report_curves(device, width, layers, batch, length, steps):
    mine, theirs = models(width, width // 64, layers, length, device, [fovea_function, torchs])
    count = sum(p.numel() for p in mine.parameters())
    curves = [train(m, steps, batch, length, device, rate=1e-3, half=True) for m in (mine, theirs)]
    apart = (curves[0] - curves[1]).abs().max()
    print(
        f"{count / 1e6:.1f} M parameters, {steps} steps: loss {curves[0][0]:.3f} to {curves[0][-1]:.4f} (fovea), "
        f"{curves[1][-1]:.4f} (torch); at most {apart:.4f} apart"
    )


def report_steps(device, width, layers, batch, length):
    pair = models(width, width // 64, layers, length, device, [fovea_function, torchs])
    tokens = torch.randint(VOCABULARY, (batch, length), device=device)

    def stepper(model, context):
        def step():
            with context(), torch.autocast(device, dtype=torch.bfloat16):
                loss = loss_of(model, tokens)
            loss.backward()
            model.zero_grad()

        return step

    steps = [stepper(pair[0], contextlib.nullcontext), stepper(pair[1], only_flash)]
    for how, make in [("", lambda step: step)] + [(" as a graph", as_graph)] * (device == "cuda"):
        for name, (median, least) in zip(["fovea", "torch, flash"], step_times([make(s) for s in steps], device)):
            print(f"step of {batch} x {length} tokens{how}, {name}: {median:.2f} ms, at least {least:.2f} ms")


def report_host(device):
    q, k, v = (torch.randn(1, 8, 128, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    dout = torch.randn_like(q)
    functions = {"fovea": fovea.scaled_dot_product_attention, "torch, flash": F.scaled_dot_product_attention}
    for name, function in [*functions.items()] * 2:
        with contextlib.nullcontext() if name == "fovea" else only_flash():
            with torch.no_grad():
                plain = host_time(lambda: function(q, k, v, is_causal=True), device)
            forward = host_time(lambda: function(*leaves, is_causal=True), device)
            both = host_time(lambda: torch.autograd.grad(function(*leaves, is_causal=True), leaves, dout), device)
        print(
            f"host time of B1 H8 S128 D64, {name}: {plain:.1f} us, with gradients {forward:.1f} us, "
            f"with the backward pass {both:.1f} us"
        )


if __name__ == "__main__":
    if torch.cuda.is_available():
        report_host("cuda")
        report_steps("cuda", width=320, layers=8, batch=32, length=512)
        report_steps("cuda", width=320, layers=8, batch=4, length=4096)
        report_curves("cuda", width=320, layers=8, batch=16, length=512, steps=200)
    else:  # the same in small
        report_host("cpu")
        report_steps("cpu", width=64, layers=1, batch=2, length=512)
        report_curves("cpu", width=64, layers=2, batch=8, length=64, steps=50)

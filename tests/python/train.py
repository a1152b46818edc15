"""A small transformer that is trained twice from the same seed, with fovea's attention and with torch's.

As a program it compares the loss curves of 10 million parameters on a GPU, fewer on a CPU, and times training steps and
calls beside torch's flash backend. With --json FILE it writes what it measured as `fovea bench` does.
"""

import argparse
import contextlib
import datetime
import functools
import gc
import json
import pathlib
import platform
import subprocess
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


def step_times(steppers, device, rounds):
    """The median and the least of each in ms; in every round one after the other, and back in the next. Queueing is a
    matter of Python's, whose speed wavers by a tenth: it takes many rounds, with no garbage collected in them."""
    pairs = [(stepper, []) for stepper in steppers]
    gc.disable()
    for turn in range(rounds + 3):
        gc.collect(0)
        for stepper, found in pairs[:: 1 if turn % 2 else -1]:
            finish(device)
            begin = time.perf_counter()
            stepper()
            finish(device)
            if turn >= 3:
                found.append(1e3 * (time.perf_counter() - begin))
    gc.enable()
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


def host_times(contenders, device, count=50, rounds=120):
    """The least time of each in us until a call returns, the GPU's work not awaited; of contexts and calls. Python's speed
    wavers, for longer than a contender alone would take: they have their turns as steps do."""
    least = [float("inf")] * len(contenders)
    for turn in range(rounds):
        for i, (context, call) in [*enumerate(contenders)][:: 1 if turn % 2 else -1]:
            with context():
                finish(device)
                begin = time.perf_counter()
                for _ in range(count):
                    call()
                least[i] = min(least[i], (time.perf_counter() - begin) / count)
    return [1e6 * x for x in least]


FLASH = "torch-flash"  # what fovea is measured beside, as the results call it


def row(case, impl, done, timing, median, least):
    """A line of the results; times in ms."""
    return {
        "suite": "training", "case": case, "impl": impl, "kernel": None, "pass": done, "dtype": "bf16", "timing": timing,
        "ms": median, "ms_least": least, "tflops": None, "mem_bytes": None, "ok": None,
    }  # fmt: skip


def report_curves(device, width, layers, batch, length, steps):
    """Whether the two agree."""
    mine, theirs = models(width, width // 64, layers, length, device, [fovea_function, torchs])
    count = sum(p.numel() for p in mine.parameters())
    curves = [train(m, steps, batch, length, device, rate=1e-3, half=True) for m in (mine, theirs)]
    apart = (curves[0] - curves[1]).abs().max()
    print(
        f"{count / 1e6:.1f} M parameters, {steps} steps: loss {curves[0][0]:.3f} to {curves[0][-1]:.4f} (fovea), "
        f"{curves[1][-1]:.4f} (torch); at most {apart:.4f} apart"
    )
    return apart.item() < 0.02


def report_steps(device, width, layers, batch, length, rounds):
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
    rows = []
    for timing, make in [("eager", lambda step: step)] + [("graph", as_graph)] * (device == "cuda"):
        found = step_times([make(s) for s in steps], device, rounds if timing == "eager" else 40)
        for impl, (median, least) in zip(["fovea-torch", FLASH], found):
            case = f"step of {batch} x {length} tokens, {timing}"
            print(f"{case}, {impl}: {median:.2f} ms, at least {least:.2f} ms")
            rows.append(row(case, impl, "fwd+bwd", timing, median, least))
    return rows


def report_host(device):
    q, k, v = (torch.randn(1, 8, 128, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    dout = torch.randn_like(q)
    functions = {"fovea-torch": fovea.scaled_dot_product_attention, FLASH: F.scaled_dot_product_attention}

    def both(function):
        return torch.autograd.grad(function(*leaves, is_causal=True), leaves, dout)

    kinds = {
        "host, no gradients": (False, lambda function: function(q, k, v, is_causal=True)),
        "host, fwd": (True, lambda function: function(*leaves, is_causal=True)),
        "host, fwd+bwd": (True, both),
    }
    rows = []
    for done, (recorded, call) in kinds.items():
        contenders = [
            (only_flash if impl == FLASH else contextlib.nullcontext, functools.partial(call, function))
            for impl, function in functions.items()
        ]
        with torch.set_grad_enabled(recorded):
            found = host_times(contenders, device)
        for impl, least in zip(functions, found):
            print(f"call of B1 H8 S128 D64, {done}, {impl}: {least:.1f} us")
            rows.append(row("call of B1 H8 S128 D64", impl, done, "host", least / 1e3, least / 1e3))
    return rows


def machine():
    facts = {"cpu": platform.processor(), "architecture": platform.machine(), "threads": torch.get_num_threads()}
    facts["torch"] = torch.__version__
    if torch.cuda.is_available():
        facts["torch"] += f", cuDNN {torch.backends.cudnn.version()}"
        names = {"driver_version": "driver", "clocks.sm": "gpu_sm_mhz", "power.limit": "gpu_power_limit_w"}
        asked = ["nvidia-smi", "--query-gpu=" + ",".join(names), "--format=csv,noheader,nounits"]
        answer = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        facts |= {name: text if name == "driver" else float(text) for name, text in zip(names.values(), answer)}
    return facts


def write(path, rows):
    asked = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    result = {"machine": machine(), "commit": commit, "date": date, "rows": rows, "skipped": []}
    pathlib.Path(path).write_text(json.dumps(result, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the results to this file")
    options = parser.parse_args()
    if torch.cuda.is_available():
        rows = report_host("cuda")
        for batch, length, rounds in [(32, 512, 300), (4, 4096, 200), (128, 512, 60), (16, 4096, 60)]:
            # Of 16k tokens Python takes longer to queue a step than the GPU to do it; of 64k it is the GPU that counts.
            rows += report_steps("cuda", width=320, layers=8, batch=batch, length=length, rounds=rounds)
        agree = report_curves("cuda", width=320, layers=8, batch=16, length=512, steps=200)
    else:  # the same in small
        rows = report_host("cpu")
        rows += report_steps("cpu", width=64, layers=1, batch=2, length=512, rounds=40)
        agree = report_curves("cpu", width=64, layers=2, batch=8, length=64, steps=50)
    for line in rows:
        line["ok"] = agree if line["impl"] != FLASH else None
    if options.json:
        write(options.json, rows)


if __name__ == "__main__":
    main()

"""The operator in torch: scaled_dot_product_attention on the inputs of one case."""

import math

import torch

from torch_backend import pinned, try_on_gpu
from torch_tensors import take


class OperatorCase:
    """The inputs of one case on a device, and the arguments that say its mask."""

    def __init__(self, device, case, tensors):
        self.device = device
        generator = torch.Generator(device).manual_seed(case["seed"])
        given = {name: take(t, device, generator) for name, t in tensors.items()}
        # The views of the contract are [batch, len, head, dim]; torch names the same memory
        # [batch, head, len, dim].
        self.q, self.k, self.v = (given[n].transpose(1, 2) for n in ("q", "k", "v"))
        self.dout = given["dout"].transpose(1, 2) if "dout" in given else None
        plain_causal = (
            case["left"] < 0 and case["right"] == 0 and case["prefix"] == 0
            and case["q"] == case["kv"]
        )
        self.options = {
            "scale": case["scale"],
            "is_causal": False,
            "attn_mask": None,
            "enable_gqa": case["hq"] != case["hkv"],
        }
        extra = [given[n] for n in ("bias", "mask") if n in given]
        if plain_causal and not extra and not case["alibi"]:
            self.options["is_causal"] = True
        else:
            self.options["attn_mask"] = self.combined_mask(case, given)

    def open(self, engine):
        return Attention(self, engine)

    def positions(self, case):
        """Distance from each key to each query's position, [q, kv]; positions align at the end."""
        position = torch.arange(case["q"], device=self.device) + (case["kv"] - case["q"])
        return position.unsqueeze(1) - torch.arange(case["kv"], device=self.device).unsqueeze(0)

    def visible(self, case):
        """Boolean [q, kv] of the mask by position; None where all is visible."""
        if case["left"] < 0 and case["right"] < 0:
            return None
        behind = self.positions(case)
        seen = torch.ones_like(behind, dtype=torch.bool)
        if case["left"] >= 0:
            seen &= behind <= case["left"]
        if case["right"] >= 0:
            seen &= behind >= -case["right"]
        if case["prefix"] > 0:
            seen[:, : case["prefix"]] = True
        return None if bool(seen.all()) else seen

    def combined_mask(self, case, given):
        """attn_mask for what is_causal cannot say: boolean where it can be, else additive."""
        seen = self.visible(case)
        if "mask" in given:
            seen = given["mask"] if seen is None else given["mask"] & seen
        if "bias" not in given and not case["alibi"]:
            return seen
        added = given["bias"] if "bias" in given else None
        if case["alibi"]:
            slopes = given["alibi_slopes"]
            slopes = slopes.reshape(-1, slopes.shape[-1], 1, 1)
            alibi = slopes * -self.positions(case).abs()
            added = alibi if added is None else added.float() + alibi
        if seen is not None:
            added = added.masked_fill(~seen, -math.inf)
        return added.to(self.q.dtype)


class Attention:
    """One case by one backend of torch, ready to run."""

    same = True  # as what fovea computes
    captured = True  # in a graph, on a GPU

    def __init__(self, inputs, engine):
        self.inputs = inputs
        self.engine = engine
        self.graph = None  # autograd's, from one forward pass
        if engine != "cpu":
            try_on_gpu(self.runner("fwd"))

    def kernel(self):
        if self.engine != "cpu":
            return "sdpa/" + self.engine
        try:
            i = self.inputs
            chosen = torch._fused_sdp_choice(
                i.q, i.k, i.v, i.options["attn_mask"], 0.0, i.options["is_causal"],
                scale=i.options["scale"], enable_gqa=i.options["enable_gqa"])
            return {0: "sdpa/math", 1: "sdpa/flash"}.get(int(chosen), f"sdpa/{int(chosen)}")
        except Exception:  # a private function: its absence is no reason to stop
            return "sdpa"

    def forward(self, q, k, v):
        with pinned(None if self.engine == "cpu" else self.engine):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **self.inputs.options)

    def runner(self, name):
        """A function that runs the pass once and returns its outputs."""
        i = self.inputs
        if name == "fwd":
            def run():
                with torch.no_grad():
                    return (self.forward(i.q, i.k, i.v),)
            return run
        if self.graph is None:
            leaves = [t.detach().requires_grad_(True) for t in (i.q, i.k, i.v)]
            self.graph = (self.forward(*leaves), leaves)
        out, leaves = self.graph
        return lambda: torch.autograd.grad(out, leaves, i.dout, retain_graph=True)

    def outputs(self, name):
        """The outputs of a pass by name, in the contract's [batch, len, head, dim]."""
        names = ("out",) if name == "fwd" else ("dq", "dk", "dv")
        return {n: t.transpose(1, 2) for n, t in zip(names, self.runner(name)())}

"""A layer's case in torch: its inputs, and each way in which torch runs the layer on them."""

import functools

import torch

from torch_backend import pinned, try_on_gpu
from torch_layers import (Rope, Sizes, ccgqa_hydra_layer, ccgqa_zaya_layer, fused_layer, latent_layer,
                          multi_head_layer, no_rope)
from torch_tensors import take

CLASSIC = {"mha": multi_head_layer, "self": fused_layer, "gqa": fused_layer, "mqa": fused_layer,
           "latent": latent_layer}


class LayerCase:
    def __init__(self, device, case, tensors):
        self.case = case
        self.generator = torch.Generator(device).manual_seed(case["seed"])
        given = {name: take(t, device, self.generator) for name, t in tensors.items()}
        self.x, self.dout = given["x"], given.get("dout")
        self.sampled_dout = given.get("sampled_dout")  # of the part that is checked, and 0 elsewhere
        self.weights = {name[2:]: t for name, t in given.items() if name.startswith("w.")}
        self.sizes = Sizes(case["hq"], case["hkv"], case["d"])

    def open(self, engine):
        if engine.startswith("gqa-"):
            return Layer(self, engine, engine[4:], *self.gqa_instead(), same=False)
        return Layer(self, engine, engine, self.function(), self.weights, same=True)

    def function(self):
        """The case's layer as a function of x and its weights."""
        length, sizes = self.x.shape[1], self.sizes
        if self.case["layer"] != "ccgqa":
            rope = Rope(length, sizes.dim, self.x) if self.case["rope"] else no_rope
            return functools.partial(CLASSIC[self.case["layer"]], sizes=sizes, rope=rope)
        if self.case["zaya"]:
            rope = Rope(length, sizes.dim, self.x, fraction=0.5)
            return functools.partial(ccgqa_zaya_layer, sizes=sizes, rope=rope)
        rope = Rope(length, sizes.dim, self.x, interleaved=True)
        return functools.partial(ccgqa_hydra_layer, sizes=sizes, rope=rope)

    def gqa_instead(self):
        """The layer of the same width and heads that CCGQA stands in for: Linear and attention, the least it can be."""
        embed = self.x.shape[-1]
        sizes = Sizes(self.sizes.heads, self.sizes.heads_kv, embed // self.sizes.heads)

        def drawn(rows, columns):
            weight = torch.empty(rows, columns, dtype=self.x.dtype, device=self.x.device)
            return weight.normal_(std=columns ** -0.5, generator=self.generator)

        weights = {"qkv": drawn(sizes.q + 2 * sizes.kv, embed), "out": drawn(embed, sizes.q)}
        return functools.partial(fused_layer, sizes=sizes, rope=no_rope), weights


def compiled(function):
    torch.compiler.reset()  # sizes of earlier cases would count towards the recompilations that torch allows
    return torch.compile(function, dynamic=False, fullgraph=True)


class Layer:
    """One layer by one of torch's ways, ready to run.

    way: "cpu"; on a GPU "flash" or "cudnn" (attention held to that backend) or "eager" (call by call, never
    captured); "compile" (torch.compile, the backend left to torch).
    """

    def __init__(self, case, engine, way, function, weights, same):
        self.case = case
        self.engine = engine
        self.way = way
        self.same = same  # as what fovea computes
        self.captured = way != "eager"
        self.backend = way if way in ("flash", "cudnn") else None
        self.function = compiled(function) if way == "compile" else function
        self.names = list(weights)
        self.x = case.x.detach().requires_grad_(True)
        self.weights = {name: t.detach().requires_grad_(True) for name, t in weights.items()}
        if case.x.device.type != "cpu":
            try_on_gpu(self.runner("fwd"))
        elif way == "compile":
            self.runner("fwd")()  # fails here where there is no compiler

    def kernel(self):
        layer = "gqa" if not self.same else self.case.case["layer"]
        return f"{layer}/{self.way}"

    def forward(self):
        with pinned(self.backend):
            return self.function(self.x, self.weights)

    def runner(self, name, dout=None):
        """A function that runs the pass once and returns its outputs."""
        if name == "fwd":
            def run():
                with torch.no_grad():
                    return (self.forward(),)
            return run
        leaves = (self.x, *self.weights.values())
        dout = self.case.dout if dout is None else dout

        def run():
            out = self.forward()
            return (out, *torch.autograd.grad(out, leaves, dout))
        return run

    def outputs(self, name):
        """The outputs of a pass by name; gradients are those of the part that is checked."""
        names = ["out"] if name == "fwd" else ["out", "dx"] + ["dw." + n for n in self.names]
        return dict(zip(names, self.runner(name, self.case.sampled_dout)()))

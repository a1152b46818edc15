"""The layers in plain PyTorch that the benchmark measures fovea's against: they must be the same layers."""

import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench" / "peers"))

from torch_layer_case import LayerCase  # noqa: E402
from torch_layers import Rope, Sizes, ccgqa_hydra_layer, ccgqa_zaya_layer  # noqa: E402

BATCH, LENGTH, EMBED = 2, 7, 32
WAY = {"cpu": "cpu", "cuda": "eager"}  # that takes any case


def wave(shape, a, b, s, device):
    count = torch.Size(shape).numel()
    return (s * torch.sin(a * torch.arange(count, dtype=torch.float64) + b)).reshape(shape).to(device)


class Golden:
    """A layer in float64 on the waves of the published numbers, and the gradients of sum(y * g)."""

    def __init__(self, device, layer, sizes, rope, weights):
        x = wave((BATCH, LENGTH, EMBED), 0.37, 0.11, 1.0, device).requires_grad_()
        weights = {name: w.requires_grad_() for name, w in weights.items()}
        self.y = layer(x, weights, sizes, Rope(LENGTH, sizes.dim, x, **rope))
        g = torch.cos(0.29 * torch.arange(self.y.numel(), dtype=torch.float64) + 0.07).to(device)
        gradients = torch.autograd.grad((self.y.flatten() * g).sum(), (x, *weights.values()))
        self.dx, self.dw = gradients[0], dict(zip(weights, gradients[1:]))


def hydra(device, heads_kv):
    sizes = Sizes(heads=4, heads_kv=heads_kv, dim=4)
    q, kv = sizes.q, sizes.kv
    weights = {
        "qkv": wave((q + 2 * kv, EMBED), 0.71, 0.23, 0.15, device),
        "out": wave((EMBED, q), 0.53, 0.41, 0.20, device),
        "q_conv1": wave((q, 4, 3), 0.83, 0.31, 0.30, device),
        "q_conv2": wave((q, q, 3), 0.67, 0.19, 0.20, device),
        "k_conv1": wave((kv, 4, 3), 0.79, 0.29, 0.30, device),
        "k_conv2": wave((kv, kv, 3), 0.61, 0.17, 0.20, device),
        "temperature": torch.full((1,), 2.0, dtype=torch.float64, device=device),
    }
    return Golden(device, ccgqa_hydra_layer, sizes, {"interleaved": True}, weights)


def near(value):
    return pytest.approx(value, rel=1e-10, abs=1e-12)


def test_hydra_gives_the_golden_numbers(device):
    a = hydra(device, heads_kv=2)
    for tensor, total, absolutes, first, last in (
        (a.y, 4.554672041865e-02, 5.483998305483, 1.0284656569e-02, 1.2923727127e-03),
        (a.dx, 6.659612128531e-03, 5.368934286294e-01, -2.4653362766e-03, -9.2257864532e-05),
        (a.dw["qkv"], 4.439045909200e-01, 2.265743327336e01, 6.3264405724e-03, -1.0008217443e-02),
        (a.dw["out"], -2.752179885786e-01, 5.235674919134e01, -5.9001039051e-02, -1.5549774133e-02),
        (a.dw["q_conv1"], -1.553925933347e-03, 6.776052930377e-02, 8.9497969748e-04, -8.2853604110e-05),
        (a.dw["q_conv2"], 3.065138140525e-03, 2.107715962669e-01, 6.0328916456e-04, 6.6699604145e-05),
        (a.dw["k_conv1"], 7.609892800524e-03, 3.703025488479e-01, -3.6054749536e-03, 9.5818502339e-03),
        (a.dw["k_conv2"], 2.039620428256e-04, 1.478389745135, -2.4480082702e-03, -6.4178778750e-04),
    ):
        flat = tensor.flatten()
        assert (flat.sum().item(), flat.abs().sum().item()) == (near(total), near(absolutes))
        assert (flat[0].item(), flat[-1].item()) == (near(first), near(last))
    assert a.dw["temperature"].item() == near(-6.493812209406e-04)


def test_hydra_with_as_many_kv_heads(device):
    b = hydra(device, heads_kv=4)
    assert b.y.abs().sum().item() == near(8.339671559262)
    assert (b.y.flatten()[0].item(), b.y.flatten()[-1].item()) == (near(3.3093198117e-02), near(-2.5629232220e-02))
    assert b.dx.abs().sum().item() == near(1.868074416170)
    assert b.dw["temperature"].item() == near(4.808710572897e-04)


def test_zaya_gives_the_golden_numbers(device):
    sizes = Sizes(heads=4, heads_kv=2, dim=4)
    qk, half = sizes.q + sizes.kv, sizes.kv // 2
    qkv = torch.cat(
        (
            wave((qk, EMBED), 0.71, 0.23, 0.15, device),
            wave((half, EMBED), 0.47, 0.13, 0.15, device),
            wave((half, EMBED), 0.43, 0.37, 0.15, device),
        )
    )
    weights = {
        "qkv": qkv,
        "out": wave((EMBED, sizes.q), 0.53, 0.41, 0.20, device),
        "channel_conv": wave((qk, 1, 2), 0.83, 0.31, 0.5, device),
        "head_conv": wave((qk, 4, 2), 0.67, 0.19, 0.3, device),
        "temperature": wave((2,), 1.0, 0.5, 0.2, device),
    }
    p = Golden(device, ccgqa_zaya_layer, sizes, {}, weights)
    assert p.y.sum().item() == near(4.163709560571e-01)
    assert p.y.abs().sum().item() == near(8.971245297048e01)
    assert (p.y.flatten()[0].item(), p.y.flatten()[-1].item()) == (
        near(-3.1130914752e-02),
        near(-5.3130454291e-02),
    )
    assert p.dx.abs().sum().item() == near(1.095797602207e01)
    assert p.dw["qkv"][:qk].abs().sum().item() == near(7.280081742358e01)
    assert p.dw["channel_conv"].abs().sum().item() == near(1.235515924698)
    assert p.dw["head_conv"].abs().sum().item() == near(4.229563155643)
    assert p.dw["temperature"].tolist() == [near(5.7462967724e-02), near(5.9926890990e-02)]


def drawn(*sizes):
    strides = torch.empty(sizes, device="meta").stride()
    return {
        "dtype": "f32",
        "sizes": sizes,
        "strides": strides,
        "elements": torch.Size(sizes).numel(),
        "draw": "normal",
        "deviation": 0.1,
    }


def test_a_case_gives_outputs_by_the_names_of_its_weights(device):
    case = {"layer": "gqa", "zaya": False, "hq": 4, "hkv": 2, "d": 8, "rope": True, "tf32": False, "seed": 1}
    tensors = {
        "x": drawn(2, 9, 24),
        "dout": drawn(2, 9, 24),
        "sampled_dout": drawn(2, 9, 24),
        "w.qkv": drawn(64, 24),
        "w.out": drawn(24, 32),
    }
    layer = LayerCase(torch.device(device), case, tensors).open(WAY[device])
    assert layer.same
    assert {name: tuple(t.shape) for name, t in layer.outputs("fwd").items()} == {"out": (2, 9, 24)}
    assert {name: tuple(t.shape) for name, t in layer.outputs("fwd+bwd").items()} == {
        "out": (2, 9, 24),
        "dx": (2, 9, 24),
        "dw.qkv": (64, 24),
        "dw.out": (24, 32),
    }


def test_the_layer_beside_ccgqa_is_not_compressed(device):
    case = {"layer": "ccgqa", "zaya": False, "hq": 4, "hkv": 2, "d": 2, "rope": True, "tf32": False, "seed": 1}
    tensors = {"x": drawn(1, 9, 32), "dout": drawn(1, 9, 32)}
    layer = LayerCase(torch.device(device), case, tensors).open("gqa-" + WAY[device])
    assert not layer.same
    assert tuple(layer.weights["qkv"].shape) == ((4 + 2 * 2) * 8, 32)
    assert [tuple(t.shape) for t in layer.runner("fwd+bwd")()] == [(1, 9, 32), (1, 9, 32), (64, 32), (32, 32)]

"""CCGQAttention: the published numbers of both definitions, and checkpoints under all of their names."""

import math

import pytest
import torch

import fovea.nn as fnn
from layer_cases import make, tokens

HYDRA_FILLS = {
    "qkv_proj.weight": (0.71, 0.23, 0.15),
    "o_proj.weight": (0.53, 0.41, 0.20),
    "q_conv.conv1.weight": (0.83, 0.31, 0.30),
    "q_conv.conv2.weight": (0.67, 0.19, 0.20),
    "k_conv.conv1.weight": (0.79, 0.29, 0.30),
    "k_conv.conv2.weight": (0.61, 0.17, 0.20),
}
ZAYA_FILLS = {
    "o_proj.weight": (0.53, 0.41, 0.20),
    "qk_conv.conv1.weight": (0.83, 0.31, 0.5),
    "qk_conv.conv2.weight": (0.67, 0.19, 0.3),
    "key_temperature": (1.0, 0.5, 0.2),
}
# Sum, sum of absolutes, first and last element of the output and of the gradients.
HYDRA_A = {
    "y": (4.554672041865e-02, 5.483998305483e00, 1.0284656569e-02, 1.2923727127e-03),
    "x": (6.659612128531e-03, 5.368934286294e-01, -2.4653362766e-03, -9.2257864532e-05),
    "qkv_proj.weight": (4.439045909200e-01, 2.265743327336e01, 6.3264405724e-03, -1.0008217443e-02),
    "o_proj.weight": (-2.752179885786e-01, 5.235674919134e01, -5.9001039051e-02, -1.5549774133e-02),
    "q_conv.conv1.weight": (-1.553925933347e-03, 6.776052930377e-02, 8.9497969748e-04, -8.2853604110e-05),
    "q_conv.conv2.weight": (3.065138140525e-03, 2.107715962669e-01, 6.0328916456e-04, 6.6699604145e-05),
    "k_conv.conv1.weight": (7.609892800524e-03, 3.703025488479e-01, -3.6054749536e-03, 9.5818502339e-03),
    "k_conv.conv2.weight": (2.039620428256e-04, 1.478389745135e00, -2.4480082702e-03, -6.4178778750e-04),
    "key_temperature": (-6.493812209406e-04,),
}
# Sum of absolutes and last element of the output, sum of absolutes of dx, gradient of the temperature.
HYDRA_WITHOUT = {
    "qk_mean": (5.729373499658, 1.7178505176e-03, 0.4609341158945, -3.457507556394e-04),
    "qk_norm": (5.756165907000, 3.8411030105e-03, 0.2746877099680, None),
    "value_shift": (6.073248256335, 5.0865107090e-03, 1.164358669243, -6.878016885013e-04),
}


def wave(shape, a, b, s):
    count = math.prod(shape)
    return (s * torch.sin(a * torch.arange(count, dtype=torch.float64) + b)).view(shape)


def filled(layer, fills):
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name in fills:
                parameter.copy_(wave(parameter.shape, *fills[name]))
    return layer


def run(layer):
    """(y, gradients by name, that of x among them) of the loss that the numbers are of."""
    x = wave((2, 7, layer.embed_dim), 0.37, 0.11, 1.0).requires_grad_()
    y = layer(x)
    g = torch.cos(0.29 * torch.arange(y.numel(), dtype=torch.float64) + 0.07).view(y.shape)
    (y * g).sum().backward()
    return y.detach(), {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def hydra(num_kv_heads=2, **options):
    layer = fnn.CCGQAttention.hydra(32, 4, num_kv_heads, compression=2, dtype=torch.float64, **options)
    return filled(layer, HYDRA_FILLS)


def near(value, expected):
    return value == pytest.approx(expected, rel=1e-9)


def test_hydra():
    y, gradients = run(hydra())
    for name, expected in HYDRA_A.items():
        t = y if name == "y" else gradients[name]
        found = (t.sum(), t.abs().sum(), t.flatten()[0], t.flatten()[-1])
        assert near([v.item() for v in found[: len(expected)]], list(expected)), name


@pytest.mark.parametrize("step", HYDRA_WITHOUT)
def test_hydra_without(step):
    sum_y, last_y, sum_dx, dtau = HYDRA_WITHOUT[step]
    y, gradients = run(hydra(**{step: False}))
    assert near([y.abs().sum().item(), y.flatten()[-1].item()], [sum_y, last_y])
    assert near(gradients["x"].abs().sum().item(), sum_dx)
    if dtau is None:
        assert "key_temperature" not in gradients
    else:
        assert near(gradients["key_temperature"].item(), dtau)


def test_hydra_with_as_many_kv_heads():
    y, gradients = run(hydra(num_kv_heads=4))
    found = [y.abs().sum(), y.flatten()[0], y.flatten()[-1], gradients["x"].abs().sum()]
    found.append(gradients["key_temperature"])
    expected = [8.339671559262, 3.3093198117e-02, -2.5629232220e-02, 1.868074416170, 4.808710572897e-04]
    assert near([v.item() for v in found], expected)


def test_zaya():
    layer = filled(
        fnn.CCGQAttention.zaya(32, 4, 2, 4, conv_bias=False, rope_fraction=1.0, dtype=torch.float64), ZAYA_FILLS
    )
    rows = [wave((24, 32), 0.71, 0.23, 0.15), wave((4, 32), 0.47, 0.13, 0.15), wave((4, 32), 0.43, 0.37, 0.15)]
    with torch.no_grad():
        layer.qkv_proj.weight.copy_(torch.cat(rows))
    y, gradients = run(layer)
    found = [y.sum(), y.abs().sum(), y.flatten()[0], y.flatten()[-1]]
    expected = [4.163709560571e-01, 8.971245297048e01, -3.1130914752e-02, -5.3130454291e-02]
    assert near([v.item() for v in found], expected)
    sums = {
        "x": 1.095797602207e01,
        "qk_conv.conv1.weight": 1.235515924698,
        "qk_conv.conv2.weight": 4.229563155643,
    }
    for name, expected in sums.items():
        assert near(gradients[name].abs().sum().item(), expected), name
    assert near(gradients["qkv_proj.weight"][:24].abs().sum().item(), 7.280081742358e01)
    assert near(gradients["key_temperature"].tolist(), [5.7462967724e-02, 5.9926890990e-02])


def test_state_dict_names():
    names = set(fnn.CCGQAttention(32, 4, 2).state_dict())
    assert names == {*HYDRA_FILLS, "key_temperature"}


@pytest.mark.parametrize("prefix", ["", "blocks.0.attention."])
def test_older_names_of_hydra(prefix):
    layer = make("ccgqa, hydra")
    q, k, v, v_before = layer.qkv_proj.weight.detach().split([32, 16, 8, 8])
    older = {"q_down": q, "k_down": k, "v_down": v, "v_shift_down": v_before, "o_proj": layer.o_proj.weight}
    for part in ("q_conv", "k_conv"):
        for i in "12":
            older[part + i] = layer.get_submodule(f"{part}.conv{i}").weight
    state = {f"{prefix}{name}.weight": weight for name, weight in older.items()}
    state[f"{prefix}key_temperature"] = layer.key_temperature
    assert_loads(layer, make("ccgqa, hydra"), state, prefix)
    assert f"{prefix}q_down.weight" in state  # what was given is left as it was


@pytest.mark.parametrize("prefix", ["", "blocks.0.attention."])
def test_other_names_of_zaya(prefix):
    layer = make("ccgqa, zaya")
    q, k, v, v_before = layer.qkv_proj.weight.detach().split([32, 16, 8, 8])
    other = {"linear_q": q, "linear_k": k, "val_proj1": v, "val_proj2": v_before, "o_proj": layer.o_proj.weight}
    state = {f"{prefix}{name}.weight": weight for name, weight in other.items()}
    for i, conv in enumerate((layer.qk_conv.conv1, layer.qk_conv.conv2)):
        state[f"{prefix}conv_qk.{i}.weight"] = conv.weight
        state[f"{prefix}conv_qk.{i}.bias"] = conv.bias
    state[f"{prefix}temp"] = layer.key_temperature
    assert_loads(layer, make("ccgqa, zaya"), state, prefix)


def assert_loads(layer, fresh, state, prefix):
    model = fresh
    for name in reversed(prefix.split(".")[:-1]):
        model = torch.nn.ModuleDict({name: model})
    model.load_state_dict(state, strict=True)
    x = tokens(layer)
    assert torch.equal(fresh(x), layer(x))


def test_padding_is_not_inverted():
    layer = make("ccgqa, hydra", torch.float64)
    x = tokens(layer, dtype=torch.float64)
    valid = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1] * 7])
    out = layer(x, key_padding=valid)
    assert torch.equal(out[0, :5], layer(x[:1, :5])[0]) and torch.equal(out[1], layer(x)[1])
    assert not layer(x, key_padding=torch.zeros(2, 7, dtype=torch.bool)).any()  # no key at all
    with pytest.raises(ValueError, match="must not be given together with key_padding"):
        layer(x, key_padding=valid, mask=valid)

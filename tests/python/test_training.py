"""A transformer trains to the same loss curve on fovea's attention as on torch's."""

import torch

import train


def test_same_loss_curve():
    variants = [train.torchs, train.fovea_function, train.fovea_layer]
    made = train.models(width=32, heads=2, layers=2, length=32, device="cpu", variants=variants)
    theirs, *mine = (train.train(model, steps=130, batch=16, length=32, device="cpu") for model in made)
    assert theirs[0] > 3.4 and theirs[-1] < 0.6  # it learns what only attention can tell it
    for curve in mine:
        torch.testing.assert_close(curve, theirs, rtol=0, atol=2e-3)


def test_same_loss_curve_in_half_precision():
    made = train.models(32, 2, 2, 32, "cpu", [train.torchs, train.fovea_function, train.fovea_layer])
    theirs, *mine = (train.train(model, 20, 16, 32, "cpu", half=True) for model in made)
    for curve in mine:
        torch.testing.assert_close(curve, theirs, rtol=0, atol=0.03)

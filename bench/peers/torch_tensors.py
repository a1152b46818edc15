"""Tensors on their way between `fovea bench` and torch: raw files, described by JSON."""

import ctypes
import os

import torch

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64,
          "bool": torch.bool, "i32": torch.int32}


def take(tensor, device, generator):
    """The tensor that a request describes: from its file, or drawn here ("draw")."""
    dtype = DTYPES[tensor["dtype"]]
    if "file" in tensor:
        with open(tensor["file"], "rb") as file:
            data = bytearray(file.read())
        raw = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        # A copy lies in torch's own, aligned memory.
        memory = raw.clone() if device.type == "cpu" else raw.to(device)
    else:
        memory = torch.empty(tensor["elements"], dtype=dtype, device=device)
        if tensor["draw"] == "mask":  # three keys of four take part, as in fovea's own
            memory.bernoulli_(0.75, generator=generator)
        else:
            memory.normal_(std=tensor["deviation"], generator=generator)
    return memory.as_strided(tensor["sizes"], tensor["strides"])


def write(tensor, path):
    dense = tensor.detach().contiguous().cpu()
    data = ctypes.string_at(dense.data_ptr(), dense.numel() * dense.element_size())
    with open(path, "wb") as file:
        file.write(data)


def write_all(named, folder):
    for name, tensor in named.items():
        write(tensor, os.path.join(folder, name + ".bin"))

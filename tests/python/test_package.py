"""The package as it is installed: what it is linked to, what it needs, what it says about itself."""

import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import typing

import pytest
import torch

import fovea
import fovea.compat.flash_attn
import fovea.hf
import fovea.nn

ROOT = pathlib.Path(__file__).parents[2]
LIBRARY = pathlib.Path(fovea.__file__).with_name("libfovea_torch.so")


def symbols(*options):
    if shutil.which("nm") is None:
        pytest.skip("no nm on this machine")
    text = subprocess.run(
        ["nm", "-D", "-C", *options, str(LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    return [line.split(maxsplit=1)[-1].split(maxsplit=1)[-1].strip() for line in text.splitlines()]


def test_only_the_stable_abi_of_torch_is_linked():
    wanted = symbols("--undefined-only")
    unstable = [s for s in wanted if re.search(r"\b(c10|at|torch|caffe2)::", s)]
    assert unstable == []
    assert sum(s.startswith("aoti_torch_") for s in wanted) > 10  # nm was understood


def test_nothing_of_the_library_is_exported():
    """Two libraries in one process may hold different versions of fovea."""
    assert [s for s in symbols("--defined-only") if "fovea" in s] == []


def test_needs_neither_triton_nor_a_gpu():
    program = """
import sys
sys.modules["triton"] = None
import torch, fovea
q = torch.randn(1, 4, 2, 8)
print(fovea.attention(q, q, q, causal=True).shape)
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 4, 2, 8])" in done.stdout


def test_version_is_that_of_the_library():
    header = (ROOT / "include/fovea/version.h").read_text()
    assert fovea.__version__ == ".".join(re.findall(r"define FOVEA_VERSION_\w+ (\d+)", header))


def public_functions():
    modules = (fovea, fovea.compat.flash_attn)
    found = [getattr(module, name) for module in modules for name in module.__all__ if name != "nn"]
    layers = [getattr(fovea.nn, name) for name in fovea.nn.__all__]
    methods = [layer.forward for layer in layers if hasattr(layer, "forward")]
    return [*found, fovea.hf.register, fovea.hf.attention_forward, *methods]


@pytest.mark.parametrize("function", public_functions(), ids=lambda f: f.__qualname__)
def test_is_documented_and_typed(function):
    assert function.__doc__
    hints = typing.get_type_hints(function)
    assert set(inspect.signature(function).parameters) - {"self"} | {"return"} == set(hints)
    if torch.Tensor in hints.values():
        assert "[" in function.__doc__, "no shapes"


@pytest.mark.parametrize("name", [n for n in fovea.nn.__all__ if n not in ("KVCache", "LayerOptions")])
def test_layer_is_documented_and_typed(name):
    layer = getattr(fovea.nn, name)
    assert "Args:" in layer.__doc__
    for parameter in inspect.signature(layer).parameters.values():
        assert parameter.annotation is not parameter.empty
        assert parameter.name in layer.__doc__ or parameter.name in fovea.nn.LayerOptions.__doc__, parameter.name


@pytest.mark.parametrize("page", ["docs/pytorch.md", "docs/tutorial.md"])
def test_code_on_pages(page):
    """Its blocks one after the other, as a reader would type them."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert len(blocks) >= 4
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)

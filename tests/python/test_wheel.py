"""The package as pip builds and installs it, over the library of this build, used from elsewhere."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

import fovea

ROOT = pathlib.Path(__file__).parents[2]
BUILD = pathlib.Path(fovea.__file__).parents[2]  # <build>/python/fovea/__init__.py


def must(*command, **settings):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **settings)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if importlib.util.find_spec("scikit_build_core") is None:
        pytest.skip("no scikit-build-core in this Python")
    if not (BUILD / "CMakeCache.txt").exists() or not (BUILD / "src/cli/fovea").exists():
        pytest.skip("fovea was not imported from a whole build")
    room = tmp_path_factory.mktemp("wheel")
    must("cmake", "--install", BUILD, "--prefix", room / "prefix")
    must(
        *(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            ROOT,
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "-w",
            room,
        ),
        *("-C", "cmake.define.FOVEA_USE_INSTALLED=ON", "-C", f"cmake.define.fovea_ROOT={room / 'prefix'}"),
    )
    shutil.rmtree(room / "prefix")  # nothing may be needed from there any more
    (found,) = room.glob("fovea-*.whl")
    return found


def test_serves_every_python(wheel):
    assert wheel.name.startswith(f"fovea-{fovea.__version__}-py3-none-linux_")


def test_holds_the_package_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {str(p.relative_to(ROOT / "python")) for p in (ROOT / "python/fovea").rglob("*.py")}
    assert names == sources | {"fovea/py.typed", "fovea/libfovea_torch.so"}


def test_works_where_it_is_installed(wheel, tmp_path):
    must(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", tmp_path, wheel)
    program = """
import torch, fovea, fovea.hf, fovea.compat.flash_attn
q = torch.randn(1, 4, 2, 8, requires_grad=True)
fovea.attention(q, q, q, causal=True).sum().backward()
print(fovea.__file__, q.grad.shape)
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    printed = must(sys.executable, "-c", program, env=environment, cwd=tmp_path)
    assert printed.split() == [f"{tmp_path}/fovea/__init__.py", "torch.Size([1,", "4,", "2,", "8])"]

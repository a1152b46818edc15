"""Every test that takes `device` runs on the CPU, and with --device cuda on the GPU instead."""

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="cpu or cuda")
    parser.addoption("--problems", type=int, default=1000, help="random problems that are compared with torch")


@pytest.fixture
def device(request):
    return request.config.getoption("--device")


@pytest.fixture
def problems(request):
    return request.config.getoption("--problems")


@pytest.fixture(autouse=True)
def _same_numbers_at_every_run():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Problems are small and tests run side by side: threads would wait for each other's."""
    torch.set_num_threads(1)

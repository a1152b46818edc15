"""scaled_dot_product_attention held to one of its backends."""

import contextlib
import warnings

import torch


def pinned(backend):
    """A context in which torch runs this backend of attention and no other; None leaves the choice to it."""
    if backend is None:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel
    return sdpa_kernel({"flash": SDPBackend.FLASH_ATTENTION,
                        "cudnn": SDPBackend.CUDNN_ATTENTION,
                        "efficient": SDPBackend.EFFICIENT_ATTENTION}[backend])


def first_line(error):
    return str(error).strip().split("\n")[0] or type(error).__name__


def try_on_gpu(run):
    """Runs once; raises, with torch's reasons, where the pinned backend does not take the case."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            run()
            torch.cuda.synchronize()
        except RuntimeError as error:
            reasons = [str(w.message).split(" (Triggered")[0].strip() for w in said]
            telling = [r for r in reasons if "disabled" not in r and "not used because" not in r]
            raise RuntimeError("; ".join([first_line(error)] + telling[:2])) from error

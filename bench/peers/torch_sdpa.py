"""Runs PyTorch's scaled_dot_product_attention for `fovea bench`, one request a line.

Requests and answers are JSON objects on standard input and output; the tensors travel as raw
files. Every answer has "ok"; a request that cannot be met is answered with "ok": false and "why".

  {"cmd": "hello", "threads": 2}                           -> version
  {"cmd": "open", "case": {...}, "tensors": {...}}         -> kernel, or why torch cannot do it
  {"cmd": "sample", "pass": "fwd", "repeats": 4, "warm": true}  -> seconds of the repeats together
  {"cmd": "memory", "pass": "fwd"}                         -> bytes beyond inputs and outputs, or null
  {"cmd": "outputs", "pass": "bwd", "dir": "/tmp/x"}       -> writes out.bin, or dq.bin dk.bin dv.bin
"""

import ctypes
import json
import math
import os
import sys
import time


def visible_mask(torch, case):
    """Boolean [q, kv] of the mask by position, aligned at the end; None where all is visible."""
    q_len, kv_len = case["q"], case["kv"]
    left, right, prefix = case["left"], case["right"], case["prefix"]
    position = torch.arange(q_len).unsqueeze(1) + (kv_len - q_len)
    key = torch.arange(kv_len).unsqueeze(0)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    if left >= 0:
        seen &= key >= position - left
    if right >= 0:
        seen &= key <= position + right
    if prefix > 0:
        seen |= key < prefix
    return None if bool(seen.all()) else seen


class Attention:
    """One case, ready to run."""

    def __init__(self, torch, case, tensors):
        self.torch = torch
        for feature, asked in case["inexpressible"].items():
            if asked:
                raise ValueError(f"scaled_dot_product_attention has no {feature}")
        given = {name: self.load(t) for name, t in tensors.items()}
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
        self.graph = None

    def load(self, tensor):
        torch = self.torch
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16,
                 "f64": torch.float64, "bool": torch.bool, "i32": torch.int32}[tensor["dtype"]]
        with open(tensor["file"], "rb") as file:
            data = bytearray(file.read())
        raw = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        # A clone lies in torch's own, aligned memory.
        return raw.clone().as_strided(tensor["sizes"], tensor["strides"])

    def combined_mask(self, case, given):
        """attn_mask for what is_causal cannot say: boolean where it can be, else additive."""
        torch = self.torch
        seen = visible_mask(torch, case)
        if "mask" in given:
            seen = given["mask"] if seen is None else given["mask"] & seen
        if "bias" not in given and not case["alibi"]:
            return seen
        added = given["bias"].float() if "bias" in given else torch.zeros(())
        if case["alibi"]:
            slopes = given["alibi_slopes"]
            slopes = slopes.reshape(-1, slopes.shape[-1], 1, 1)
            position = torch.arange(case["q"]).unsqueeze(1) + (case["kv"] - case["q"])
            added = added - slopes * (position - torch.arange(case["kv"])).abs()
        if seen is not None:
            added = added.masked_fill(~seen, -math.inf)
        return added.to(self.q.dtype)

    def kernel(self):
        try:
            chosen = self.torch._fused_sdp_choice(
                self.q, self.k, self.v, self.options["attn_mask"], 0.0, self.options["is_causal"],
                scale=self.options["scale"], enable_gqa=self.options["enable_gqa"])
            return {0: "sdpa/math", 1: "sdpa/flash"}.get(int(chosen), f"sdpa/{int(chosen)}")
        except Exception:  # a private function: its absence is no reason to stop
            return "sdpa"

    def forward(self):
        return self.torch.nn.functional.scaled_dot_product_attention(
            self.q, self.k, self.v, **self.options)

    def runner(self, name):
        """A function that runs the pass once and returns its outputs."""
        torch = self.torch
        if name == "fwd":
            def run():
                with torch.no_grad():
                    return (self.forward(),)
            return run
        if self.graph is None:
            leaves = [t.detach().requires_grad_(True) for t in (self.q, self.k, self.v)]
            saved = self.q, self.k, self.v
            self.q, self.k, self.v = leaves
            self.graph = (self.forward(), leaves)
            self.q, self.k, self.v = saved
        out, leaves = self.graph
        return lambda: torch.autograd.grad(out, leaves, self.dout, retain_graph=True)


def sample(run, repeats, warm):
    """Seconds of `repeats` runs, after one that is not counted where `warm` asks for it."""
    if warm:
        run()
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    return time.perf_counter() - begin


def status_kib(field):
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1])
    raise OSError("no " + field)


def extra_memory(run):
    """Peak resident bytes of one run beyond what was there and what it returns; None if unknown."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # resets the peak
        before = status_kib("VmRSS")
        outputs = run()
        peak = status_kib("VmHWM")
    except (OSError, AttributeError):
        return None
    returned = sum(t.numel() * t.element_size() for t in outputs)
    return max(0, (peak - before) * 1024 - returned)


def write_outputs(attention, name, folder):
    outputs = attention.runner(name)()
    names = ("out",) if name == "fwd" else ("dq", "dk", "dv")
    for tensor_name, tensor in zip(names, outputs):
        # Back to the contract's [batch, len, head, dim].
        dense = tensor.detach().transpose(1, 2).contiguous()
        data = ctypes.string_at(dense.data_ptr(), dense.numel() * dense.element_size())
        with open(os.path.join(folder, tensor_name + ".bin"), "wb") as file:
            file.write(data)


def serve(torch, requests, answer):
    attention = None
    for line in requests:
        request = json.loads(line)
        try:
            command = request["cmd"]
            if command == "hello":
                torch.set_num_threads(request["threads"])
                answer(ok=True, version=torch.__version__, threads=torch.get_num_threads())
            elif command == "open":
                attention = None  # the last case's memory goes before this one's comes
                attention = Attention(torch, request["case"], request["tensors"])
                answer(ok=True, kernel=attention.kernel())
            elif command == "sample":
                run = attention.runner(request["pass"])
                answer(ok=True, seconds=sample(run, request["repeats"], request["warm"]))
            elif command == "memory":
                answer(ok=True, bytes=extra_memory(attention.runner(request["pass"])))
            elif command == "outputs":
                write_outputs(attention, request["pass"], request["dir"])
                answer(ok=True)
            else:
                answer(ok=False, why=f"no command {command}")
        except Exception as error:  # the benchmark goes on without this case
            answer(ok=False, why=str(error).strip().split("\n")[0] or type(error).__name__)


def main():
    # Answers leave by a descriptor of their own: whatever a library prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**fields):
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        import torch
    except Exception as error:
        answer(ok=False, why=f"torch cannot be imported: {error}")
        return
    serve(torch, sys.stdin, answer)


if __name__ == "__main__":
    main()

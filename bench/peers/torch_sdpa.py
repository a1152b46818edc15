"""Runs PyTorch's scaled_dot_product_attention for `fovea bench`, one request a line.

Requests and answers are JSON objects on standard input and output; the tensors travel as raw
files. Every answer has "ok"; a request that cannot be met is answered with "ok": false and "why".

  {"cmd": "hello", "threads": 2, "device": "cuda:0"}   -> version
  {"cmd": "load", "case": {...}, "tensors": {...}}     -> takes the inputs; a tensor has a "file", or
                                                          is to be drawn here ("draw": "normal")
  {"cmd": "open", "backend": "flash"}                  -> kernel, or why torch cannot do the case by it
  {"cmd": "sample", "backend": "cpu", "pass": "fwd", "repeats": 4, "warm": true}
                                                       -> seconds of the repeats together
  {"cmd": "sample", "backend": "flash", "pass": "fwd", "calls": 20, "replays": 10, "uncounted": 3}
                                                       -> on a GPU: seconds of `replays` replays of a
                                                          graph of `calls` calls; "eager": true where
                                                          the calls could not be captured in one
  {"cmd": "memory", "backend": "cpu", "pass": "fwd"}   -> bytes beyond inputs and outputs, or null
  {"cmd": "outputs", "backend": "cpu", "pass": "bwd", "dir": "/tmp/x"}
                                                       -> writes out.bin, or dq.bin dk.bin dv.bin
"""

import contextlib
import ctypes
import gc
import json
import math
import os
import sys
import time
import warnings


class Inputs:
    """The inputs of one case on a device, and the arguments that say its mask."""

    def __init__(self, torch, device, case, tensors):
        self.torch = torch
        self.device = device
        self.generator = torch.Generator(device).manual_seed(case["seed"])
        given = {name: self.take(t) for name, t in tensors.items()}
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

    def take(self, tensor):
        torch = self.torch
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16,
                 "f64": torch.float64, "bool": torch.bool, "i32": torch.int32}[tensor["dtype"]]
        if "file" in tensor:
            with open(tensor["file"], "rb") as file:
                data = bytearray(file.read())
            raw = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            # A copy lies in torch's own, aligned memory.
            memory = raw.clone() if self.device.type == "cpu" else raw.to(self.device)
        elif tensor["draw"] == "mask":  # three keys of four take part, as in fovea's own
            memory = torch.empty(tensor["elements"], dtype=dtype, device=self.device)
            memory.bernoulli_(0.75, generator=self.generator)
        else:
            memory = torch.empty(tensor["elements"], dtype=dtype, device=self.device)
            memory.normal_(generator=self.generator)
        return memory.as_strided(tensor["sizes"], tensor["strides"])

    def positions(self, case):
        """Distance from each key to each query's position, [q, kv]; positions align at the end."""
        torch = self.torch
        position = torch.arange(case["q"], device=self.device) + (case["kv"] - case["q"])
        return position.unsqueeze(1) - torch.arange(case["kv"], device=self.device).unsqueeze(0)

    def visible(self, case):
        """Boolean [q, kv] of the mask by position; None where all is visible."""
        if case["left"] < 0 and case["right"] < 0:
            return None
        behind = self.positions(case)
        seen = self.torch.ones_like(behind, dtype=self.torch.bool)
        if case["left"] >= 0:
            seen &= behind <= case["left"]
        if case["right"] >= 0:
            seen &= behind >= -case["right"]
        if case["prefix"] > 0:
            seen[:, : case["prefix"]] = True
        return None if bool(seen.all()) else seen

    def combined_mask(self, case, given):
        """attn_mask for what is_causal cannot say: boolean where it can be, else additive."""
        torch = self.torch
        seen = self.visible(case)
        if "mask" in given:
            seen = given["mask"] if seen is None else given["mask"] & seen
        if "bias" not in given and not case["alibi"]:
            return seen
        added = given["bias"] if "bias" in given else None
        if case["alibi"]:
            slopes = given["alibi_slopes"]
            slopes = slopes.reshape(-1, slopes.shape[-1], 1, 1)
            alibi = slopes * -self.positions(case).abs()
            added = alibi if added is None else added.float() + alibi
        if seen is not None:
            added = added.masked_fill(~seen, -math.inf)
        return added.to(self.q.dtype)


class Attention:
    """One case by one backend of torch, ready to run."""

    def __init__(self, torch, inputs, backend):
        self.torch = torch
        self.inputs = inputs
        self.backend = backend
        self.graph = None  # autograd's, from one forward pass
        if backend != "cpu":
            self.try_forward()

    def chosen(self):
        """A context in which torch runs this backend and no other."""
        if self.backend == "cpu":
            return contextlib.nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel
        return sdpa_kernel({"flash": SDPBackend.FLASH_ATTENTION,
                            "cudnn": SDPBackend.CUDNN_ATTENTION,
                            "efficient": SDPBackend.EFFICIENT_ATTENTION}[self.backend])

    def try_forward(self):
        """Raises, with torch's reasons, where the backend does not take the case."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                self.runner("fwd")()
                self.torch.cuda.synchronize()
            except RuntimeError as error:
                reasons = [str(w.message).split(" (Triggered")[0].strip() for w in said]
                telling = [r for r in reasons if "disabled" not in r and "not used because" not in r]
                raise RuntimeError("; ".join([first_line(error)] + telling[:2])) from error

    def kernel(self):
        if self.backend != "cpu":
            return "sdpa/" + self.backend
        try:
            i = self.inputs
            chosen = self.torch._fused_sdp_choice(
                i.q, i.k, i.v, i.options["attn_mask"], 0.0, i.options["is_causal"],
                scale=i.options["scale"], enable_gqa=i.options["enable_gqa"])
            return {0: "sdpa/math", 1: "sdpa/flash"}.get(int(chosen), f"sdpa/{int(chosen)}")
        except Exception:  # a private function: its absence is no reason to stop
            return "sdpa"

    def forward(self, q, k, v):
        with self.chosen():
            return self.torch.nn.functional.scaled_dot_product_attention(
                q, k, v, **self.inputs.options)

    def runner(self, name):
        """A function that runs the pass once and returns its outputs."""
        torch, i = self.torch, self.inputs
        if name == "fwd":
            def run():
                with torch.no_grad():
                    return (self.forward(i.q, i.k, i.v),)
            return run
        if self.graph is None:
            leaves = [t.detach().requires_grad_(True) for t in (i.q, i.k, i.v)]
            self.graph = (self.forward(*leaves), leaves)
        out, leaves = self.graph
        return lambda: torch.autograd.grad(out, leaves, i.dout, retain_graph=True)


class HostTimer:
    """Times runs on the CPU."""

    def sample(self, attention, request):
        run = attention.runner(request["pass"])
        if request["warm"]:
            run()
        begin = time.perf_counter()
        for _ in range(request["repeats"]):
            run()
        return {"seconds": time.perf_counter() - begin}


class GpuTimer:
    """Times runs on a GPU by events around a queue of graph replays, as fovea's own are.

    Everything runs on one side stream: a capture takes a stream that is not the default one, and
    autograd runs a backward on the stream that its forward ran on.
    """

    def __init__(self, torch):
        self.torch = torch
        self.stream = torch.cuda.Stream()
        self.captured = {}  # (backend, pass, calls) -> a graph, or None where capture failed

    def capture(self, run, calls):
        torch = self.torch
        for _ in range(3):  # what a first run sets up cannot be captured
            run()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                for _ in range(calls):
                    run()  # the outputs go at once: their memory serves the next call
        except RuntimeError as error:
            print("capture failed:", error, file=sys.stderr)
            torch.cuda.synchronize()
            return None
        return graph

    def sample(self, attention, request):
        torch = self.torch
        calls = request["calls"]
        with torch.cuda.stream(self.stream):
            run = attention.runner(request["pass"])
            key = (attention.backend, request["pass"], calls)
            if key not in self.captured:
                self.captured[key] = self.capture(run, calls)
            graph = self.captured[key]

            launch_one = graph.replay if graph else run
            per_replay = 1 if graph else calls

            def launch(replays):
                for _ in range(replays * per_replay):
                    launch_one()

            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            launch(request["uncounted"])
            begin.record(self.stream)
            launch(request["replays"])
            end.record(self.stream)
            end.synchronize()
        return {"seconds": begin.elapsed_time(end) * 1e-3, "eager": graph is None}


def status_kib(field):
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1])
    raise OSError("no " + field)


def extra_memory(torch, device, run):
    """Peak bytes of one run beyond what was there and what it returns; None if unknown."""
    if device.type != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs = run()
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - before
    else:
        try:
            ctypes.CDLL(None).malloc_trim(0)
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")  # resets the peak
            before = status_kib("VmRSS")
            outputs = run()
            taken = (status_kib("VmHWM") - before) * 1024
        except (OSError, AttributeError):
            return None
    returned = sum(t.numel() * t.element_size() for t in outputs)
    return max(0, taken - returned)


def write_outputs(outputs, name, folder):
    names = ("out",) if name == "fwd" else ("dq", "dk", "dv")
    for tensor_name, tensor in zip(names, outputs):
        # Back to the contract's [batch, len, head, dim].
        dense = tensor.detach().transpose(1, 2).contiguous().cpu()
        data = ctypes.string_at(dense.data_ptr(), dense.numel() * dense.element_size())
        with open(os.path.join(folder, tensor_name + ".bin"), "wb") as file:
            file.write(data)


def first_line(error):
    return str(error).strip().split("\n")[0] or type(error).__name__


class Worker:
    """Answers requests: one device, one case at a time, each backend that was opened for it."""

    def __init__(self, torch):
        self.torch = torch
        self.device = torch.device("cpu")
        self.timer = HostTimer()
        self.inputs = None
        self.opened = {}

    def hello(self, request):
        torch = self.torch
        torch.set_num_threads(request["threads"])
        self.device = torch.device(request["device"])
        version = torch.__version__
        if self.device.type != "cpu":
            if not torch.cuda.is_available():
                raise RuntimeError(f"torch {version} finds no CUDA device")
            torch.cuda.set_device(self.device)
            self.timer = GpuTimer(torch)
            version += f", cuDNN {torch.backends.cudnn.version()}"
        return {"version": version}

    def load(self, request):
        # The last case's memory goes, back to the driver, before this one's comes.
        self.inputs, self.opened = None, {}
        if self.device.type != "cpu":
            self.torch.backends.cuda.matmul.allow_tf32 = request["case"]["tf32"]
            self.timer.captured = {}
            gc.collect()
            self.torch.cuda.empty_cache()
        self.inputs = Inputs(self.torch, self.device, request["case"], request["tensors"])
        if self.device.type != "cpu":
            self.torch.cuda.synchronize()  # other streams read them
        return {}

    def open(self, request):
        attention = Attention(self.torch, self.inputs, request["backend"])
        self.opened[request["backend"]] = attention
        return {"kernel": attention.kernel()}

    def run(self, request):
        return self.opened[request["backend"]].runner(request["pass"])

    def sample(self, request):
        return self.timer.sample(self.opened[request["backend"]], request)

    def memory(self, request):
        with self.side_stream():
            return {"bytes": extra_memory(self.torch, self.device, self.run(request))}

    def outputs(self, request):
        with self.side_stream():
            write_outputs(self.run(request)(), request["pass"], request["dir"])
        return {}

    def side_stream(self):
        """The stream on which a GPU's work is captured: autograd remembers where a forward ran."""
        if self.device.type == "cpu":
            return contextlib.nullcontext()
        return self.torch.cuda.stream(self.timer.stream)


def serve(worker, requests, answer):
    commands = ("hello", "load", "open", "sample", "memory", "outputs")
    for line in requests:
        request = json.loads(line)
        try:
            if request["cmd"] not in commands:
                raise ValueError(f"no command {request['cmd']}")
            answer(ok=True, **getattr(worker, request["cmd"])(request))
        except Exception as error:  # the benchmark goes on without this case
            answer(ok=False, why=first_line(error))


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
    serve(Worker(torch), sys.stdin, answer)


if __name__ == "__main__":
    main()

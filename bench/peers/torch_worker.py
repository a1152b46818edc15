"""Runs PyTorch for `fovea bench`, one request a line: its attention (torch_sdpa.py), its layers (torch_layer_case.py).

Requests and answers are JSON objects on standard input and output; the tensors travel as raw
files. Every answer has "ok"; a request that cannot be met is answered with "ok": false and "why".

  {"cmd": "hello", "threads": 2, "device": "cuda:0"}   -> version
  {"cmd": "load", "case": {...}, "tensors": {...}}     -> takes the inputs; a tensor has a "file", or
                                                          is to be drawn here ("draw": "normal")
  {"cmd": "open", "backend": "flash"}                  -> kernel, or why torch cannot do the case by it;
                                                          "same": false where it is another layer
  {"cmd": "sample", "backend": "cpu", "pass": "fwd", "repeats": 4, "warm": true}
                                                       -> seconds of the repeats together
  {"cmd": "sample", "backend": "flash", "pass": "fwd", "calls": 20, "replays": 10, "uncounted": 3}
                                                       -> on a GPU: seconds of `replays` replays of a
                                                          graph of `calls` calls; "eager": true where
                                                          the calls could not be captured in one
  {"cmd": "memory", "backend": "cpu", "pass": "fwd"}   -> bytes beyond inputs and outputs, or null
  {"cmd": "outputs", "backend": "cpu", "pass": "bwd", "dir": "/tmp/x"}
                                                       -> writes out.bin, or dq.bin dk.bin dv.bin; of a
                                                          layer out.bin, dx.bin, dw.NAME.bin
"""

import contextlib
import ctypes
import gc
import json
import os
import sys
import time

try:
    import torch
    from torch_backend import first_line
    from torch_layer_case import LayerCase
    from torch_sdpa import OperatorCase
    from torch_tensors import write_all
    no_torch = None
except Exception as error:
    no_torch = f"torch cannot be imported: {error}"


class HostTimer:
    """Times runs on the CPU."""

    def sample(self, contender, request):
        run = contender.runner(request["pass"])
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

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.captured = {}  # (engine, pass, calls) -> a graph, or None where there is none

    def capture(self, run, calls):
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

    def sample(self, contender, request):
        calls = request["calls"]
        with torch.cuda.stream(self.stream):
            run = contender.runner(request["pass"])
            key = (contender.engine, request["pass"], calls)
            if key not in self.captured:
                self.captured[key] = self.capture(run, calls) if contender.captured else None
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


def extra_memory(device, run):
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


class Worker:
    """Answers requests: one device, one case at a time, each engine that was opened for it."""

    def __init__(self):
        self.device = torch.device("cpu")
        self.timer = HostTimer()
        self.case = None
        self.opened = {}

    def hello(self, request):
        torch.set_num_threads(request["threads"])
        self.device = torch.device(request["device"])
        version = torch.__version__
        if self.device.type != "cpu":
            if not torch.cuda.is_available():
                raise RuntimeError(f"torch {version} finds no CUDA device")
            torch.cuda.set_device(self.device)
            self.timer = GpuTimer()
            version += f", cuDNN {torch.backends.cudnn.version()}"
        return {"version": version}

    def load(self, request):
        # The last case's memory goes, back to the driver, before this one's comes.
        self.case, self.opened = None, {}
        if self.device.type != "cpu":
            torch.backends.cuda.matmul.allow_tf32 = request["case"]["tf32"]
            self.timer.captured = {}
            gc.collect()
            torch.cuda.empty_cache()
        kind = LayerCase if "layer" in request["case"] else OperatorCase
        self.case = kind(self.device, request["case"], request["tensors"])
        if self.device.type != "cpu":
            torch.cuda.synchronize()  # other streams read them
        return {}

    def open(self, request):
        with self.side_stream():
            contender = self.case.open(request["backend"])
        self.opened[request["backend"]] = contender
        return {"kernel": contender.kernel(), "same": contender.same}

    def run(self, request):
        return self.opened[request["backend"]].runner(request["pass"])

    def sample(self, request):
        return self.timer.sample(self.opened[request["backend"]], request)

    def memory(self, request):
        with self.side_stream():
            return {"bytes": extra_memory(self.device, self.run(request))}

    def outputs(self, request):
        with self.side_stream():
            outputs = self.opened[request["backend"]].outputs(request["pass"])
            write_all(outputs, request["dir"])
        return {}

    def side_stream(self):
        """The stream on which a GPU's work is captured: autograd remembers where a forward ran."""
        if self.device.type == "cpu":
            return contextlib.nullcontext()
        return torch.cuda.stream(self.timer.stream)


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

    if no_torch:
        answer(ok=False, why=no_torch)
        return
    serve(Worker(), sys.stdin, answer)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Weighbridge beside the Python script that it replaces, in one run, as Markdown tables.

    pip install torch safetensors numpy               # fbgemm-gpu-cpu too, for its operators
    cargo build --release --workspace
    python tests/load/compare.py                      # both parts; --help tells the rest

Kernels: PyTorch's quantization operators, a copy and a read of memory, and `cargo bench`'s figures of Weighbridge's
own kernels; GB/s of F32 input, thread for thread, over tables that no cache holds.

Script: what people write today: load a checkpoint, quantize every table by PyTorch's operator, save safetensors, hash
the file, copy it to a store. Its steps are timed after the imports, in this process; Weighbridge is timed as a whole
process. Rounds alternate, and figures are medians. Checkpoints and both stores lie in the same folder, in the page
cache.
"""

import argparse
import contextlib
import gc
import hashlib
import json
import os
import pathlib
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
BINARY = REPOSITORY / os.environ.get("CARGO_TARGET_DIR", "target") / "release/weighbridge"
ROWS = 1_000_000
CORES = len(os.sched_getaffinity(0))
THREADS = sorted({1, CORES})
# Weighbridge's name of an encoding, and PyTorch's operator for it.
OPERATORS = {
    "int8_sbf32": ("embedding_bag_byte_prepack", torch.ops.quantized.embedding_bag_byte_prepack),
    "int4_sbf16": ("embedding_bag_4bit_prepack", torch.ops.quantized.embedding_bag_4bit_prepack),
    "int2_sbf16": ("embedding_bag_2bit_prepack", torch.ops.quantized.embedding_bag_2bit_prepack),
    "f16": ("Tensor.half()", torch.Tensor.half),
}
# How the script loads; by the checkpoint's format.
LOADS = {
    "pt": ["torch.load", "torch.load, mmap"],
    "safetensors": ["safe_open"],
    "dcp": ["planner", "dcp_to_torch_save"],
}
STEPS = ["load", "quantize", "save", "sha256", "store", "sync"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=".", help="a folder on the disk that is to be measured")
    parser.add_argument("--binary", type=pathlib.Path, default=BINARY)
    parser.add_argument("--part", choices=["kernels", "script"], help="one part alone")
    parser.add_argument("--runs", type=int, default=5, help="rounds [5]")
    parser.add_argument("--kernels", type=pathlib.Path, help="a file of our kernels' JSON lines, instead of a command")
    parser.add_argument(
        "--kernels-command",
        default="cargo bench --workspace --bench kernels -- --json",
        help="what prints the kernels' figures as JSON lines [%(default)s]",
    )
    parser.add_argument("--script", nargs=4, help=argparse.SUPPRESS, metavar=("CHECKPOINT", "LOAD", "THREADS", "STORE"))
    options = parser.parse_args()
    if options.script:
        checkpoint, load, threads, store = options.script
        return run_script(pathlib.Path(checkpoint), load, int(threads), pathlib.Path(store))
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"torch {torch.__version__} ({capability}), {CORES} hardware threads, {options.runs} rounds\n")
    if options.part != "script":
        compare_kernels(options)
    if options.part != "kernels":
        with tempfile.TemporaryDirectory(prefix="compare-", dir=options.folder) as folder:
            compare_script(options, pathlib.Path(folder).resolve())


# Kernels


def compare_kernels(options):
    """One row for each kernel, width and number of threads."""
    fbgemm = fbgemm_operators()
    figures = {}
    ours = {}
    for round_ in range(options.runs):
        # Three runs of ours among the rounds: each is as long as many of theirs.
        if round_ in (0, options.runs // 2, options.runs - 1):
            for key, figure in our_kernels(options).items():
                ours.setdefault(key, []).append(figure)
        for width in (64, 128):
            table = torch.randn(ROWS, width) * 0.05
            for threads in THREADS:
                torch.set_num_threads(threads)
                for name, work in kernels(table, fbgemm).items():
                    work()
                    started = time.perf_counter()
                    work()
                    took = time.perf_counter() - started
                    figures.setdefault((name, width, threads), []).append(table.nbytes / took / 1e9)
    print("| kernel | width | threads | PyTorch GB/s | FBGEMM GB/s | Weighbridge GB/s | Weighbridge / PyTorch |")
    print("|---|---|---|---|---|---|---|")
    names = ["memcpy", "sum", *OPERATORS]
    for name in names:
        for width in (64, 128):
            for threads in THREADS:
                theirs = statistics.median(figures[name, width, threads])
                other = figures.get((f"fbgemm {name}", width, threads))
                own = ours.get((name, width, threads))
                own = own and statistics.median(own)
                label = f"{name} ({OPERATORS[name][0]})" if name in OPERATORS else name
                other = f"{statistics.median(other):.2f}" if other else "-"
                quotient = f"{own:.2f} | {own / theirs:.2f}" if own else "- | -"
                print(f"| {label} | {width} | {threads} | {theirs:.2f} | {other} | {quotient} |", flush=True)
    print()


def kernels(table, fbgemm):
    """What is timed over a table, by name."""
    target = torch.empty_like(table)
    work = {"memcpy": lambda: target.copy_(table), "sum": lambda: table.sum()}
    work |= {name: lambda operator=operator: operator(table) for name, (_, operator) in OPERATORS.items()}
    work |= {f"fbgemm {name}": lambda operator=operator: operator(table) for name, operator in fbgemm.items()}
    return work


def fbgemm_operators():
    """FBGEMM's operators, where it is installed."""
    try:
        import fbgemm_gpu  # noqa: F401
        import fbgemm_gpu.sparse_ops  # noqa: F401
    except ImportError:
        return {}
    operators = torch.ops.fbgemm
    return {
        "int8_sbf32": operators.FloatOrHalfToFused8BitRowwiseQuantized,
        "int4_sbf16": lambda table: operators.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(table, 4),
        "int2_sbf16": lambda table: operators.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(table, 2),
    }


def our_kernels(options):
    """Weighbridge's kernels over memory that no cache holds: GB/s by name, width and threads."""
    if options.kernels:
        text = options.kernels.read_text()
    else:
        command = shlex.split(options.kernels_command)
        run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        if run.returncode:
            note(f"no figures of our kernels: {options.kernels_command}: {run.stderr.strip().splitlines()[-1:]}")
            return {}
        text = run.stdout
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {(line["name"], line["width"], line["threads"]): line["gb_s"] for line in lines if line["where"] == "memory"}


# Script


def compare_script(options, folder):
    """One row for each checkpoint, way to load and number of threads, and one for each publish of the same."""
    binary = options.binary.resolve()
    syncs = [True, False] if "--no-sync" in help_of(binary) else [True]
    if False not in syncs:
        note("this weighbridge has no --no-sync: its durability cannot be left out")
    checkpoints = make_checkpoints(folder)
    check_alike(binary, checkpoints[0][1], folder)
    script, publish = {}, {}
    for round_ in range(options.runs):
        for label, checkpoint in checkpoints:
            note(f"round {round_ + 1}: {label}")
            for threads in THREADS:
                for load in LOADS[format_of(checkpoint)]:
                    script.setdefault((label, load, threads), []).append(steps(checkpoint, load, threads, folder))
                for sync in syncs:
                    run = publish_run(binary, checkpoint, threads, sync, folder)
                    publish.setdefault((label, threads, sync), []).append(run)
    processes = {}
    for label, checkpoint in checkpoints:
        for load in LOADS[format_of(checkpoint)]:
            processes[label, load] = process_run(checkpoint, load, CORES, folder)
    print_script(script, publish, processes)


def print_script(script, publish, processes):
    print(
        f"| checkpoint | who | threads | {', '.join(STEPS)} s | total s without sync: median (min to max) | with sync"
        " | process s, imports too | peak MiB | script / publish, neither syncs | both sync |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    median = lambda runs, figure: statistics.median(figure(run) for run in runs)
    unsynced = lambda run: sum(run[step] for step in STEPS if step != "sync")
    synced = lambda run: sum(run.values())
    for (label, load, threads), runs in script.items():
        parts = ", ".join(f"{median(runs, lambda run: run[step]):.2f}" for step in STEPS)
        whole = [unsynced(run) for run in runs]
        process = "- | -"
        if threads == CORES:
            took, peak = processes[label, load]
            process = f"{took:.2f} | {peak:.0f}"
        quotients = []
        for sync, total in ((False, unsynced), (True, synced)):
            ours = publish.get((label, threads, sync))
            quotients.append(f"{median(runs, total) / median(ours, lambda run: run[0]):.2f}" if ours else "-")
        shown = f"{statistics.median(whole):.2f} ({min(whole):.2f} to {max(whole):.2f}) | {median(runs, synced):.2f}"
        print(f"| {label} | script, {load} | {threads} | {parts} | {shown} | {process} | {' | '.join(quotients)} |")
    for (label, threads, sync), runs in publish.items():
        times = [run[0] for run in runs]
        shown = f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
        shown = f"- | {shown}" if sync else f"{shown} | -"
        how = "" if sync else " --no-sync"
        took, peak = statistics.median(times), median(runs, lambda run: run[1])
        print(f"| {label} | weighbridge publish{how} | {threads} | - | {shown} | {took:.2f} | {peak:.0f} | - | - |")


def make_checkpoints(folder):
    """256 MB and 768 MB, in every format: what they are, and where. They reach the disk before anything is timed."""
    generator = torch.Generator().manual_seed(1)
    table = lambda width: torch.randn(ROWS, width, generator=generator) * 0.05
    dense = {"model.over.0.weight": torch.randn(256, 256, generator=generator), "model.over.0.bias": torch.zeros(256)}
    small = {"model.ebc.embedding_bags.t64.weight": table(64), **dense}
    large = {**small, "model.ebc.embedding_bags.t128.weight": table(128)}
    checkpoints = []
    for label, state in (("256 MB", small), ("768 MB", large)):
        stem = folder / label.replace(" ", "-")
        torch.save(state, stem.with_suffix(".pt"))
        save_file(state, stem.with_suffix(".safetensors"))
        with quiet():
            dcp.save(state, checkpoint_id=stem.with_suffix(".dcp"), no_dist=True)
        for suffix in ("pt", "safetensors", "dcp"):
            checkpoints.append((f"{label}, {suffix}", stem.with_suffix("." + suffix)))
    os.sync()
    return checkpoints


def format_of(checkpoint):
    return checkpoint.suffix.removeprefix(".")


def steps(checkpoint, load, threads, folder):
    """The script, once: seconds of every step."""
    torch.set_num_threads(threads)
    took = {}
    with tempfile.TemporaryDirectory(dir=folder) as work:
        work = pathlib.Path(work)
        store = work / "store"
        store.mkdir()
        started = time.perf_counter()

        def done(step):
            nonlocal started
            took[step] = time.perf_counter() - started
            started = time.perf_counter()

        state = load_state(checkpoint, load, work)
        done("load")
        byte_prepack = torch.ops.quantized.embedding_bag_byte_prepack
        state = {name: byte_prepack(t) if ".embedding_bags." in name else t.contiguous() for name, t in state.items()}
        done("quantize")
        file = work / "model.safetensors"
        save_file(state, file)
        done("save")
        with open(file, "rb") as opened:
            name = hashlib.file_digest(opened, "sha256").hexdigest()
        done("sha256")
        stored = store / f"{name}.safetensors"
        shutil.copyfile(file, stored)
        (store / f"{name}.json").write_text(json.dumps({name: list(t.shape) for name, t in state.items()}))
        done("store")
        for path in (stored, store / f"{name}.json", store):
            opened = os.open(path, os.O_RDONLY)
            os.fsync(opened)
            os.close(opened)
        done("sync")
        del state
    gc.collect()
    os.sync()
    return took


def load_state(checkpoint, load, work):
    if load.startswith("torch.load"):
        return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap="mmap" in load)
    if load == "safe_open":
        with safe_open(checkpoint, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}
    if load == "planner":
        state = {}
        reader = dcp.FileSystemReader(checkpoint)
        with quiet():
            _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        return state
    converted = work / "converted.pt"
    with quiet():
        dcp_to_torch_save(checkpoint, converted)
    return torch.load(converted, map_location="cpu", weights_only=True, mmap=True)


def run_script(checkpoint, load, threads, folder):
    """What a process of the script alone does, for its time and its memory."""
    folder.mkdir()
    steps(checkpoint, load, threads, folder)


def process_run(checkpoint, load, threads, folder):
    """Seconds and peak MiB of the script as a process."""
    command = [sys.executable, __file__, "--script", checkpoint, load, str(threads), folder / "process"]
    taken = timed(command)
    shutil.rmtree(folder / "process")
    return taken


def publish_run(binary, checkpoint, threads, sync, folder):
    """Seconds and peak MiB of a publish of a checkpoint into an empty store."""
    store = folder / "weighbridge"
    command = [binary, "publish", checkpoint, "--model", "m", "--threads", str(threads), "--store", store]
    taken = timed(command + ([] if sync else ["--no-sync"]))
    shutil.rmtree(store)
    os.sync()
    return taken


def check_alike(binary, checkpoint, folder):
    """That both make the same of a checkpoint, but for how the operators round: or nothing here means anything."""
    store, served = folder / "weighbridge", folder / "served"
    timed([binary, "publish", checkpoint, "--model", "m", "--store", store])
    timed([binary, "fetch", "m", "--into", served, "--store", store])
    state = torch.load(checkpoint, weights_only=True)
    tensors = {}
    for file in (served / "current").glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}
    for name, tensor in state.items():
        table = ".embedding_bags." in name
        theirs = torch.ops.quantized.embedding_bag_byte_prepack(tensor) if table else tensor
        assert theirs.shape == tensors[name].shape and theirs.dtype == tensors[name].dtype, name
        if table:
            # A code may differ by one where a value lies between two.
            apart = (theirs[:, :-8].short() - tensors[name][:, :-8].short()).abs()
            assert apart.max() <= 1 and (apart > 0).float().mean() < 0.001, name
        else:
            assert torch.equal(theirs, tensors[name]), name
    shutil.rmtree(store)
    shutil.rmtree(served)


def timed(command):
    """Runs a command that has to succeed: seconds and peak MiB (`VmHWM`, looked at every 2 ms)."""
    peak, ended = 0, threading.Event()

    def watch(status):
        nonlocal peak
        while not ended.wait(0.002):
            with contextlib.suppress(OSError):
                line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM:")), None)
                peak = max(peak, int(line.split()[1])) if line else peak

    command = [str(part) for part in command]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WEIGHBRIDGE_")}
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        watcher = threading.Thread(target=watch, args=[pathlib.Path(f"/proc/{process.pid}/status")])
        watcher.start()
        code = process.wait()
        took = time.perf_counter() - started
        ended.set()
        watcher.join()
        if code:
            output.seek(0)
            sys.exit(f"{command}: {output.read().decode()}")
    return took, peak / 1024


def help_of(binary):
    if not binary.is_file():
        sys.exit(f"{binary} is not there; run `cargo build --release --workspace` first, or name it by --binary")
    return subprocess.run([binary, "publish", "--help"], capture_output=True, text=True).stdout


@contextlib.contextmanager
def quiet():
    """Keeps what PyTorch warns of when a distributed checkpoint is used by one process."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def note(text):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

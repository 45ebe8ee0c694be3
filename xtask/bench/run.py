"""Runs a part of the benchmarks on a machine with a GPU: one command, at most ten minutes.

run.py PART [--limit SECONDS] [--work DIR] [--out DIR]

It lies in the folder that `cargo xtask bench gpu` has packed, beside the programs, PyTorch's scripts and plan.json.
--out gets PART.json, with the figures of all jobs, and PART.log, with all that they printed. A job that fails, or for
which no time is left, is named, and the command fails at its end.
"""
import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tarfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
# Seconds that a job needs at least.
LEAST = 10


def read_json(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def gpu():
    """Name and driver of the first GPU."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(zip(("gpu", "driver"), found.splitlines()[0].split(", ")))


def run(job, programs, limit, arguments, log):
    """Runs a job; returns its status, seconds and figures."""
    figures = os.path.join(arguments.work, job["name"] + ".json")
    if os.path.exists(figures):
        os.remove(figures)
    command = [word.replace("{json}", figures) for word in job["command"]]
    if os.path.exists(os.path.join(programs, command[0])):
        command[0] = os.path.join(programs, command[0])
    environment = dict(os.environ)
    libraries = [programs, os.environ.get("LD_LIBRARY_PATH")]
    environment.update(
        LD_LIBRARY_PATH=":".join(filter(None, libraries)),
        NVFP4_KERNEL_CACHE=os.path.join(arguments.work, "kernels"),
        NVFP4_BENCH_JSON=figures,
        **job.get("environment", {}),
    )
    log.write(f"$ {' '.join(job['command'])}\n")
    log.flush()
    begun = time.monotonic()
    process = subprocess.Popen(
        command, cwd=HERE, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    try:
        status = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        # Compilers that PyTorch has started end with it.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        status = "no time was left"
    seconds = round(time.monotonic() - begun, 1)
    found = read_json(figures) if os.path.exists(figures) else None
    return {"name": job["name"], "status": status, "seconds": seconds, "figures": found}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plan = read_json(os.path.join(HERE, "plan.json"))
    parts = {part["name"]: part["jobs"] for part in plan["parts"]}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--limit", type=float, default=580.0, help="seconds after which the command has ended")
    parser.add_argument("--work", default="/tmp/nvfp4-bench")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    arguments = parser.parse_args()
    arguments.work = os.path.abspath(arguments.work)
    end = time.monotonic() + arguments.limit
    programs = os.path.join(arguments.work, "bin")
    os.makedirs(programs, exist_ok=True)
    os.makedirs(arguments.out, exist_ok=True)
    with tarfile.open(os.path.join(HERE, "programs.tar.xz"), "r:xz") as archive:
        archive.extractall(programs)
    results = {"part": arguments.part, "commit": plan["commit"], **gpu()}
    results["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    results["jobs"] = []
    with open(os.path.join(arguments.out, arguments.part + ".log"), "w", encoding="utf-8") as log:
        for job in parts[arguments.part]:
            left = end - time.monotonic()
            if left < LEAST:
                results["jobs"].append({"name": job["name"], "status": "no time was left", "seconds": 0, "figures": None})
            else:
                results["jobs"].append(run(job, programs, left, arguments, log))
            done = results["jobs"][-1]
            print(f"{done['name']}: {done['status'] or 'done'}, {done['seconds']} s", flush=True)
            with open(os.path.join(arguments.out, arguments.part + ".json"), "w", encoding="utf-8") as file:
                json.dump(results, file, indent=1)
    return any(job["status"] for job in results["jobs"])


if __name__ == "__main__":
    sys.exit(main())

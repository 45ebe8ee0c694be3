"""Runs the queue of the ladder on a machine with a GPU, in as many commands as that takes.

run.py FOLDER [--limit SECONDS] [--stop SECONDS] [--work DIR] [--out DIR] [--devices DEVICE ..]

FOLDER is one of those that `cargo xtask ladder next` has packed: what is in it is checked and unpacked into --work,
whose content outlasts the command. Then the runs of the queue whose files are there are trained, one at a time on each
GPU of the machine.
A run that is not finished before the limit writes a checkpoint, and the next command goes on with it.
--out gets results.json (all runs that have ended so far) and log.txt (what this command printed).
"""
import argparse
import concurrent.futures
import datetime
import hashlib
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time

# The end of a log that a failed run keeps.
TAIL = 3000


class Log:
    def __init__(self, path):
        self.file = open(path, "w", encoding="utf-8")
        self.lock = threading.Lock()

    def __call__(self, text):
        line = f"{time.strftime('%H:%M:%S')} {text}"
        with self.lock:
            print(line, flush=True)
            self.file.write(line + "\n")
            self.file.flush()


def read_json(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def write_json(path, value):
    with open(path + ".unfinished", "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
    os.replace(path + ".unfinished", path)


def unpack(source, sha256, work):
    """Unpacks a file of a folder: an archive into bin/, any other into data/."""
    name = os.path.basename(source)
    with open(source, "rb") as file:
        data = file.read()
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ValueError(f"{name} is damaged: its SHA-256 is {found}, but {sha256} was packed")
    if name.endswith(".tar.xz"):
        folder = os.path.join(work, "bin")
        os.makedirs(folder, exist_ok=True)
        with tarfile.open(source, "r:xz") as archive:
            archive.extractall(folder)
        return name
    target = os.path.join(work, "data", name.removesuffix(".xz"))
    with open(target + ".unfinished", "wb") as file:
        file.write(lzma.decompress(data) if name.endswith(".xz") else data)
    os.replace(target + ".unfinished", target)
    return name


def receive(folder, work, log):
    """Unpacks what is in `folder` and has not been unpacked before."""
    for name in ("data", "runs", "kernels"):
        os.makedirs(os.path.join(work, name), exist_ok=True)
    done_path = os.path.join(work, "received.json")
    done = read_json(done_path) if os.path.exists(done_path) else {}
    part = read_json(os.path.join(folder, "part.json"))
    new = {name: sha256 for name, sha256 in part["files"].items() if done.get(name) != sha256}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = [pool.submit(unpack, os.path.join(folder, name), sha256, work) for name, sha256 in new.items()]
        for job in jobs:
            log(f"unpacked {job.result()}")
    done.update(new)
    write_json(done_path, done)
    shutil.copy(os.path.join(folder, "queue.json"), os.path.join(work, "queue.json"))


def gpus(log):
    """Name and driver of each GPU, none where nvidia-smi does not answer."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip().splitlines()
        return [dict(zip(("gpu", "driver"), line.split(", "))) for line in found]
    except (OSError, subprocess.CalledProcessError) as error:
        log(f"nvidia-smi says no GPU: {error}")
        return []


def rows_of(path):
    """Losses in metrics.csv: those of training, and those of validation."""
    train, valid, speeds = [], [], []
    with open(path, encoding="utf-8") as file:
        lines = file.read().splitlines()
    names = lines[0].split(",")
    for line in lines[1:]:
        row = dict(zip(names, line.split(",")))
        if len(row) != len(names):
            break
        step = int(row["step"])
        if row["train_loss"]:
            train.append([step, float(row["train_loss"])])
        if row["valid_loss"]:
            valid.append([step, float(row["valid_loss"])])
        if row["tokens_per_s"]:
            speeds.append(float(row["tokens_per_s"]))
    return train, valid, speeds


class Runner:
    def __init__(self, arguments, log):
        self.work, self.log = arguments.work, log
        self.end, self.stop = time.monotonic() + arguments.limit, arguments.stop
        self.queue = read_json(os.path.join(self.work, "queue.json"))
        self.results_path = os.path.join(self.work, "results.json")
        self.results = read_json(self.results_path) if os.path.exists(self.results_path) else []
        self.out = arguments.out
        self.gpus = gpus(log)
        self.devices = arguments.devices or [f"cuda:{index}" for index in range(len(self.gpus))]
        # Runs that a device trains or has left for this command, and the results, are shared by the devices.
        self.lock, self.taken, self.crashes = threading.Lock(), set(), 0
        self.environment = dict(os.environ)
        libraries = os.path.join(self.work, "bin")
        self.environment["LD_LIBRARY_PATH"] = ":".join(filter(None, [libraries, os.environ.get("LD_LIBRARY_PATH")]))

    def left(self):
        return self.end - time.monotonic()

    def publish(self, result=None):
        with self.lock:
            if result is not None:
                self.results.append(result)
                self.crashes += result["status"] == "crashed"
            write_json(self.results_path, self.results)
            write_json(os.path.join(self.out, "results.json"), self.results)

    def data(self, name):
        return os.path.join(self.work, "data", name)

    def missing(self, run):
        """Files of a run that have not been received."""
        names = [*run["data"], run["valid"], "tokenizer.json"]
        missing = [name for name in names if not os.path.exists(self.data(name))]
        return missing + ([] if os.path.exists(os.path.join(self.work, "bin", "nvfp4")) else ["nvfp4"])

    def arguments(self, run, folder, device):
        """Of `nvfp4`, for a run that begins or goes on."""
        if os.path.exists(os.path.join(folder, "finetune.json")):
            return ["pretrain", "--resume", folder, "--device", device]
        shutil.rmtree(folder, ignore_errors=True)
        inputs = folder + ".inputs"
        tokenizer = os.path.join(inputs, "tokenizer")
        os.makedirs(tokenizer, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(self.data(name), tokenizer)
        config, recipe = os.path.join(inputs, "config.json"), run["recipe"]
        write_json(config, run["config"])
        if run["fields"] is not None:
            recipe = os.path.join(inputs, run["recipe"] + ".json")
            write_json(recipe, run["fields"])
        return [
            "pretrain", "--model-config", config, "--tokenizer", tokenizer, "--recipe", recipe, "--out", folder, "--device", device,
            "--data", *map(self.data, run["data"]), "--valid", self.data(run["valid"]), *run["options"],
        ]

    def step(self, folder):
        """The step of the last row of a run's metrics."""
        path = os.path.join(folder, "metrics.csv")
        train = rows_of(path)[0] if os.path.exists(path) else []
        return train[-1][0] if train else 0

    def train(self, run, device):
        """Trains on `device` until the run or the time ends. Returns False where nothing else should follow."""
        folder = os.path.join(self.work, "runs", run["name"])
        times_path = folder + ".times.json"
        times = read_json(times_path) if os.path.exists(times_path) else []
        arguments = self.arguments(run, folder, device)
        self.log(f"{run['name']}: {'goes on' if '--resume' in arguments else 'begins'} on {device}, {self.left():.0f} s left")
        begun = time.monotonic()
        with open(folder + ".log", "a", encoding="utf-8") as log:
            log.write(f"$ nvfp4 {' '.join(arguments)}\n")
            log.flush()
            command = [os.path.join(self.work, "bin", "nvfp4"), *arguments]
            # Compiled kernels of a device alone: two processes that write one cache would wait for each other.
            environment = dict(self.environment, NVFP4_KERNEL_CACHE=os.path.join(self.work, "kernels", device.replace(":", "-")))
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
            status = self.wait(process)
        times.append({"seconds": round(time.monotonic() - begun, 1), "step": self.step(folder)})
        write_json(times_path, times)
        with open(folder + ".log", encoding="utf-8", errors="replace") as log:
            tail = log.read()[-TAIL:]
        steps = int(run["options"][run["options"].index("--steps") + 1])
        if status == 0 and self.step(folder) == steps:
            self.finish(run, folder, device, times, "finished", None)
        elif status == "stopped":
            self.log(f"{run['name']}: stopped at about step {self.step(folder)} of {steps}")
            return False
        elif any(word in tail for word in ("loss of step", "validation loss at step")):
            self.log(f"{run['name']}: diverged\n{tail}")
            self.finish(run, folder, device, times, "diverged", tail)
        else:
            self.log(f"{run['name']}: failed ({status})\n{tail}")
            self.publish({"name": run["name"], "status": "crashed", "error": tail})
        return True

    def wait(self, process):
        """Waits for the process, and stops it in time. Returns its status, or "stopped"."""
        try:
            return process.wait(timeout=max(0.1, self.left() - self.stop))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        try:
            # A run that ended by itself meanwhile has ended.
            status = process.wait(timeout=max(0.1, self.left() - 0.1 * self.stop))
            return status if status == 0 else "stopped"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self.log("killed: it did not stop in time; it goes on from its last checkpoint")
            return "stopped"

    def finish(self, run, folder, device, times, status, error):
        train, valid, speeds = rows_of(os.path.join(folder, "metrics.csv"))
        speeds.sort()
        result = {key: run[key] for key in ("name", "shape", "recipe", "fields", "seed", "tokens", "commit", "corpus", "config", "options", "data")}
        index = int(device.split(":")[1]) if ":" in device else 0
        result.update(self.gpus[index] if index < len(self.gpus) else {"gpu": None, "driver": None})
        result.update(
            status=status,
            error=error,
            date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            device=device,
            seconds=round(sum(part["seconds"] for part in times), 1),
            commands=times,
            tokens_per_s=speeds[len(speeds) // 2] if speeds else None,
            train_loss=train,
            valid_loss=valid,
        )
        self.publish(result)
        shutil.rmtree(folder, ignore_errors=True)
        last = f"validation loss {valid[-1][1]:.5f}" if valid else "no loss"
        self.log(f"{run['name']}: {status}, {last}, {result['seconds']:.0f} s, {result['tokens_per_s'] or 0:.0f} tokens/s")

    def next(self):
        """The next run whose files are there and that no device has taken, or None."""
        with self.lock:
            ended = {result["name"] for result in self.results if result["status"] != "crashed"}
            for run in self.queue:
                if run["name"] in ended | self.taken or self.missing(run):
                    continue
                self.taken.add(run["name"])
                return run
        return None

    def train_all(self, device):
        """Trains runs on `device` until none is left, or no time."""
        while run := self.next():
            if self.left() < 3 * self.stop:
                self.log(f"{device}: {self.left():.0f} s left: too few for another run")
                break
            if not self.train(run, device):
                break
            if self.crashes >= 3:
                self.log("three runs have crashed: none is tried any more")
                break

    def run(self):
        for run in self.queue:
            if missing := self.missing(run):
                self.log(f"{run['name']}: waits for {', '.join(missing)}")
        with concurrent.futures.ThreadPoolExecutor(len(self.devices)) as pool:
            for job in [pool.submit(self.train_all, device) for device in self.devices]:
                job.result()
        self.publish()
        ended = {result["name"] for result in self.results if result["status"] != "crashed"}
        left = [run["name"] for run in self.queue if run["name"] not in ended]
        self.log(f"{len(ended)} of {len(self.queue)} runs have ended; left: {', '.join(left) or 'none'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds after which the command has ended")
    parser.add_argument("--stop", type=float, default=30.0, help="seconds that a run needs for its checkpoint")
    parser.add_argument("--work", default="/tmp/nvfp4-ladder")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--devices", nargs="+", help="such as cuda:0 [default: every GPU]")
    arguments = parser.parse_args()
    arguments.work = os.path.abspath(arguments.work)
    os.makedirs(arguments.work, exist_ok=True)
    os.makedirs(arguments.out, exist_ok=True)
    log = Log(os.path.join(arguments.out, "log.txt"))
    begun = time.monotonic()
    receive(arguments.folder, arguments.work, log)
    arguments.limit -= time.monotonic() - begun
    runner = Runner(arguments, log)
    if not runner.devices:
        sys.exit("there is no GPU: name a device by --devices")
    runner.run()


if __name__ == "__main__":
    sys.exit(main())

"""Kernels that have imported everything when they start: each forks from a process that has.

    unmask run  →  python kernels.py  →  a kernel for each notebook

That process imports nothing of the library, whose files may change before a kernel starts.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

KERNEL = [sys.executable, "-Xfrozen_modules=off"]  # as ipykernel starts its own
# A notebook's first ten seconds.
IMPORTED = ["adjustText", "babel.core", "bm25s", "datasets", "faiss", "matplotlib.pyplot", "scipy.stats"]
IMPORTED += ["sentence_transformers", "simsimd"]


class Kernel:
    """A kernel that was forked, with what jupyter_client asks of a `subprocess.Popen`."""

    stdin = stdout = stderr = returncode = None

    def __init__(self, pid: int, source: "Kernels"):
        self.pid, self.source = pid, source

    def poll(self) -> int | None:
        """The exit status; None while it works."""
        alone = self.source.process.poll() is not None  # a kernel ends when its source has
        with contextlib.suppress(FileNotFoundError):
            self.returncode = int(Path(self.source.ended.name, str(self.pid)).read_text())
        if self.returncode is None and alone:
            self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.05)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Kernels:
    """The process that kernels fork from, a context manager. It ends with the block or with this process,
    and they end with it.

    Args:
        environment: variables for the kernels.
    """

    def __init__(self, environment: dict[str, str]):
        self.environment = environment
        self.asking, self.ended = threading.Lock(), TemporaryDirectory()  # pid → exit status
        command = [*KERNEL, "-P", __file__, self.ended.name, *IMPORTED]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, text=True, **pipes)

    def start(self, arguments: list[str], folder: Path, environment: dict[str, str], log: str) -> Kernel:
        """Forks a kernel with these arguments; OSError where that is impossible."""
        with self.asking:
            order = json.dumps([arguments, str(folder), environment, log])
            print(order, file=self.process.stdin, flush=True)
            if not (pid := self.process.stdout.readline().strip()):
                raise BrokenPipeError
        return Kernel(int(pid), self)

    def __enter__(self) -> "Kernels":
        return self

    def __exit__(self, *error: Any) -> None:
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()
        self.ended.cleanup()


def _serve(ended: str, imported: list[str]) -> None:
    """Forks a kernel for each order that comes, and writes the exit status of each."""

    def collect(*_: Any) -> None:
        with contextlib.suppress(OSError):  # none is left; nobody asks any more; the disk is full
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                path = Path(ended, f"{found[0]}.new")
                path.write_text(str(os.waitstatus_to_exitcode(found[1])))
                path.rename(path.with_suffix(""))

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    os.environ["JPY_PARENT_PID"] = str(os.getpid())  # kernels look whether it lives
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # does not start CUDA, which cannot be forked
    for name in ["ipykernel.kernelapp", *imported]:
        with contextlib.suppress(ImportError):  # the notebook that needs it will say so
            importlib.import_module(name)
    # Who stops all processes at once means the kernels, which save what they have.
    handlers = {signal.SIGCHLD: collect, signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}
    before = {number: signal.signal(number, one) for number, one in handlers.items()}
    for order in iter(sys.stdin.readline, ""):
        try:
            pid = os.fork()
        except OSError:  # too many processes, or too little memory
            pid = ""
        if pid != 0:
            print(pid, file=answers, flush=True)
            continue
        answers.close()
        for number, one in before.items():
            signal.signal(number, one)
        return _become_kernel(*json.loads(order))


def _become_kernel(arguments: list[str], folder: str, environment: dict[str, str], log: str) -> None:
    os.setsid()
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
    threads, torch = environment.get("OMP_NUM_THREADS"), sys.modules.get("torch")
    others = threads and threads != os.environ.get("OMP_NUM_THREADS")  # than what libraries have read
    parent = os.environ["JPY_PARENT_PID"]
    os.environ.clear()
    os.environ.update(environment, JPY_PARENT_PID=parent)
    sys.argv[:], sys.path[:0] = ["ipykernel_launcher.py", *arguments], [""]
    if torch and torch.cuda._is_in_bad_fork():  # something did start CUDA
        os.execv(sys.executable, [*KERNEL, "-m", "ipykernel_launcher", *arguments])
    if torch and others:
        importlib.import_module("threadpoolctl").threadpool_limits(int(threads))
        torch.set_num_threads(int(threads))
    sys.modules["ipykernel.kernelapp"].launch_new_instance(arguments)


if __name__ == "__main__" and sys.platform == "linux":  # elsewhere libraries cannot be forked
    _serve(sys.argv[1], sys.argv[2:])

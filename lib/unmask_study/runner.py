"""Executes the notebooks that are due, each in a process of its own, side by side where none needs
another."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

from unmask.children import ENVIRONMENT, PREEMPTED, bound, grace_seconds, on_signal
from unmask.config import ParallelConfig
from unmask_study.estimate import together
from unmask_study.pipeline import Notebook, Pipeline, clock, gpu_names, hardware, utc
from unmask_study.run import Folders

QUIET = 30.0  # seconds between two lines where no terminal is
WORDS = {0: "done", 1: "failed", PREEMPTED: "stopped"}


class Execution:
    """A notebook that runs, in a process of its own; what is printed goes to its log.

    Args:
        command: that was given: with what else it is made with it goes into the record.
        environment: its variables.
    """

    def __init__(self, notebook: Notebook, pipeline: Pipeline, command: str, environment: Mapping[str, str]):
        folders, self.notebook, self.about = pipeline.folders, notebook, pipeline.describe(command)
        self.log, self.executed = folders.logs / f"{notebook.name}.log", folders.executed / notebook.path.name
        self.began, self.started = time.monotonic(), utc()
        for path in (self.log, self.executed):
            path.parent.mkdir(parents=True, exist_ok=True)
        parameters = {"preset": pipeline.preset.name, "overrides": pipeline.overrides, "run": folders.run}
        module = [sys.executable, "-m", "unmask_study.execute", str(notebook.path), json.dumps(parameters)]
        options = {"env": environment, "stderr": subprocess.PIPE, "start_new_session": True, "text": True}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(bound(module), stdout=log, **options)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def ended(self) -> bool:
        """Whether it has, and then what it, or its kernel, used of memory."""
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if pid:
            self.process.returncode = os.waitstatus_to_exitcode(status)
            self.peak_memory = 1024 * usage.ru_maxrss
        return bool(pid)

    def last_line(self) -> str:
        """What was printed last: of a training its bar."""
        lines = self.log.read_text(errors="replace")[-999:].replace("\r", "\n").split("\n")
        return next((line for line in map(str.strip, reversed(lines)) if line), "starts")


class Runner:
    """Executes notebooks, shows how far they are, and records each when it has ended.

    Args:
        due: notebooks in running order, each with the seconds that it takes.
        command: the command that was given, for the record.
        environment: variables for the notebooks.
        jobs: how many may run side by side.
    """

    def __init__(self, pipeline: Pipeline, due: dict, command: str, environment: dict, jobs: int):
        self.pipeline, self.due, self.environment, self.jobs = pipeline, due, environment, jobs
        self.command, share = command, str(max(hardware()["cores"] // jobs, 1))
        of = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")  # PyTorch's, and the tokenizer's
        self.threads = dict.fromkeys(of, share)  # where several notebooks share the cores
        self.waiting: list[Notebook] = [*due]
        self.left = {one.name for one in due}  # what is not done
        self.running: dict[int, Execution] = {}  # by their places, each with a GPU where there are some
        self.began = self.shown = time.monotonic()
        options = {"total": 1, "dynamic_ncols": True, "leave": False, "disable": not sys.stdout.isatty()}
        self.bar = tqdm(file=sys.stdout, bar_format="|{bar:20}| {desc}", **options)

    def run(self) -> None:
        """Returns when all is done.

        Raises:
            RuntimeError: notebooks failed, for the reasons that were printed when they did; those that need
                nothing of them were done.
            KeyboardInterrupt: SIGINT or SIGTERM came, or a training was stopped; all notebooks have ended.
                Its argument is the signal.
        """
        signals, deadline = [], math.inf
        with on_signal(signals.append), self.bar:
            while self._start(stopped=bool(signals)):
                time.sleep(0.1)
                self._show()
                if signals and deadline == math.inf:
                    grace = grace_seconds()
                    self._say(f"{signals[0].name}: trainings save themselves, in {grace:.0f} s at most")
                    deadline = time.monotonic() + grace
                    for one in self.running.values():
                        os.kill(one.process.pid, signal.SIGTERM)
                for place, one in [*self.running.items()]:
                    if time.monotonic() > deadline:
                        os.kill(one.process.pid, signal.SIGKILL)
                    if one.ended():
                        del self.running[place]
                        self._end(one, signals)
        if signals:  # if they came at the very end, another seed may be next
            raise KeyboardInterrupt(signals[0])
        if self.left:
            raise RuntimeError(f"not done: {', '.join(sorted(self.left))}")

    def _start(self, stopped: bool) -> bool:
        """Starts the notebooks that have what they need, as long as there is a place.

        Returns: whether any runs.
        """
        ready = [one for one in self.waiting if self.left.isdisjoint(one.after)]
        several = self.jobs > 1 and len(ready) + len(self.running) > 1  # they share the cores
        for notebook in [] if stopped else ready[: self.jobs - len(self.running)]:
            place = min({*range(self.jobs)} - self.running.keys())
            devices = gpus(self.pipeline.preset.parallel, place, self.jobs)
            variables = (self.threads if several else {}) | self.environment | devices
            self.pipeline.begin(notebook)
            self.running[place] = Execution(notebook, self.pipeline, self.command, variables)
            self.waiting.remove(notebook)
            self._say("started", notebook)
        return bool(self.running)

    def _end(self, ended: Execution, signals: list[signal.Signals]) -> None:
        """Records an execution that has ended."""
        notebook, status, seconds = ended.notebook, ended.process.returncode, round(ended.seconds, 1)
        if status == PREEMPTED and not signals:
            signals.append(signal.SIGTERM)
        status = status and (PREEMPTED if signals else 1)
        self._say(f"{WORDS[status]} after {clock(seconds)}", notebook)
        if status == 1:
            why = f"notebook {notebook.path.name} failed{ended.process.stderr.read()}\n  log: {ended.log}"
            tqdm.write(f"unmask: {why}\n  as far as it got: {ended.executed}", file=sys.stderr)
        if status == 0:
            self.pipeline.finish(notebook)
            self.left.remove(notebook.name)
        ran = {"started": ended.started, "wall_seconds": seconds, "peak_memory_bytes": ended.peak_memory}
        self.pipeline.record(notebook, ran | {"exit_status": status}, ended.about)

    def _say(self, text: str, notebook: Notebook | None = None) -> None:
        number = f"[{[*self.due].index(notebook) + 1}/{len(self.due)}] {notebook.name} · " if notebook else ""
        tqdm.write(number + text, file=sys.stdout)
        sys.stdout.flush()

    def _show(self) -> None:
        """Shows the share that is done, the minutes left and what notebooks printed last: on a terminal as a
        bar, elsewhere as a line now and then."""
        if time.monotonic() - self.shown < (QUIET if self.bar.disable else 1):
            return
        self.shown, running = time.monotonic(), [*self.running.values()]
        left = {one.notebook: max(self.due[one.notebook] - one.seconds, one.seconds / 10) for one in running}
        rest = together(left | {one: self.due[one] for one in self.waiting}, self.jobs)
        share = 1 - rest / (self.shown - self.began + rest)
        last = [f"{one.notebook.name}: {one.last_line()}" for one in running]
        text = " · ".join([f"{share:.0%} done, {math.ceil(rest / 60)} min left", *last])
        if self.bar.disable:
            self._say(text)
        else:
            self.bar.n = share
            self.bar.set_description_str(text)


# ---- what notebooks find on this machine


def check_machine(parallel: ParallelConfig, named: int | None, jobs: int) -> None:
    """Makes sure that the trainings of a run can be started here.

    Args:
        named, jobs: what --gpus and --jobs said; None: not given.
    Raises: ValueError if the machine has too few GPUs, or some that PyTorch cannot use, trainings on several
        of them would run side by side, or nothing starts the other machines' processes.
    """
    machines, here, there = parallel.num_machines, parallel.per_machine, len(_visible())
    if machines > 1 and not parallel.launcher:
        need = f"trainings on {machines} machines need parallel.launcher, the command that starts them, see"
        raise ValueError(f"{need} papermill_runs/slurm.sbatch; for one: --set parallel.num_machines=1")
    if here > max(there, 1) and (there or named):
        fits = f"--gpus {max(there, 1) * machines} uses what is there"
        cpus = f"--set parallel.num_processes={here} without --gpus trains on CPUs"
        raise ValueError(f"{here} GPUs are needed on this machine, and it has {there}: {fits}; {cpus}")
    if jobs > 1 and parallel.num_processes > 1 and (there or named or parallel.launcher):
        raise ValueError("a training on several GPUs takes all of them: --jobs 1")
    if there:
        import torch  # noqa: PLC0415 (takes seconds)

        if torch.cuda.device_count() < min(here, there):
            seen = f"nvidia-smi lists {there} GPUs, PyTorch {torch.__version__} can use"
            remedy = "install its CUDA build, or a newer driver; CUDA_VISIBLE_DEVICES= trains on CPUs"
            raise ValueError(f"{seen} {torch.cuda.device_count()}: {remedy}")


def gpus(parallel: ParallelConfig, place: int, jobs: int) -> dict[str, str]:
    """What shows a notebook its GPUs, for evaluation as for trainings: one of them each where notebooks may
    run side by side, else as many as the run was given."""
    every, here = _visible(), parallel.per_machine
    if jobs > 1 and every:
        return {"CUDA_VISIBLE_DEVICES": every[place % len(every)]}
    return {"CUDA_VISIBLE_DEVICES": ",".join(every[:here])} if len(every) > here else {}


def _visible() -> list[str]:
    """This machine's GPUs, or those of them that CUDA_VISIBLE_DEVICES leaves."""
    every = [*map(str, range(len(gpu_names())))]
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(every))
    return [one for one in named.split(",") if one not in ("", "-1")][: len(every)]


def variables(folders: Folders) -> dict[str, str]:
    """Variables for the kernels of a run, this process's own included."""
    ours = {
        "PYTHONPATH": f"{folders.library}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep),
        "PYTHONHASHSEED": "0",
        "JUPYTER_PREFER_ENV_PATH": "1",  # this interpreter's kernel, whatever kernels its user has
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # figures go into the notebook
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # one for each model would bury the rest
        "PYTHONWARNINGS": "ignore:IProgress not found",  # plain text bars are what is wanted
    }
    return ENVIRONMENT | os.environ | ours

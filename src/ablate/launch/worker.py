"""The process of one rank, forked from a server that has torch loaded. Imports torch only inside the fork."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path


def free_port() -> int:
    """A TCP port for the rendezvous of one run's ranks on this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def log_path(run: Path, attempt: int, rank: int) -> Path:
    """Where an attempt's stdout and stderr go."""
    suffix = f".rank{rank}" if rank else ""
    return run / "logs" / f"attempt-{attempt}{suffix}.log"


def _stop_with(launcher: int) -> None:
    """Ask this process to save and stop when its launcher is gone: a run must not go on that nobody watches."""
    try:
        descriptor = os.pidfd_open(launcher)
    except ProcessLookupError:
        pass
    else:
        select.select([descriptor], [], [])
    os.kill(os.getpid(), signal.SIGTERM)


def run_rank(folder: str, rank: int, world_size: int, port: int, log: str, launcher: int) -> None:
    """Be rank `rank` of the run in `folder`; ends the process with the run's exit code."""
    # Ctrl-C reaches the whole terminal group; the launcher alone decides and sends SIGTERM
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    threading.Thread(target=_stop_with, args=(launcher,), daemon=True).start()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    from transformers.utils import logging

    from ablate.train import main

    logging.disable_progress_bar()
    # DeepSpeed still calls collectives by names that torch has renamed: one warning per call says nothing new
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")

    sys.exit(main(Path(folder)))

"""`ablate plan|select|status`: what the records and the plan say, without starting anything. Imports no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ablate import files
from ablate.code import name_clash
from ablate.compose import Composer, config_dir
from ablate.errors import EXIT_DONE, EXIT_REFUSED, UsageError
from ablate.plan import make_plan
from ablate.report.tables import console, finding_lines, plan_table, selection_table
from ablate.runs import load_config, state
from ablate.select import select_run
from ablate.validity import check_plan, refusals


@contextmanager
def composer(extra: str | None = None) -> Iterator[Composer]:
    """A composer over conf/, with a folder of own levels searched first, outside a Hydra application."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.singleton import Singleton

    before = Singleton.get_state()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(config_dir())):
            loader = GlobalHydra.instance().config_loader()
            if extra is not None:
                if not Path(extra).is_dir():
                    raise UsageError(f"--config-dir {extra}: not a folder")
                loader.get_search_path().prepend("command-line", f"file://{Path(extra).resolve()}")
                loader.repository.initialize_sources(loader.get_search_path())  # type: ignore[attr-defined]
            yield Composer(loader)
    finally:
        Singleton.set_state(before)


def plan(arguments: argparse.Namespace) -> int:
    """Print a plan with its findings; exit 1 if they refuse it."""
    with composer(arguments.config_dir) as source:
        made = make_plan(source, [_as_override(a) for a in arguments.overrides])
    out = console()
    for said in (made.sweep.question, made.sweep.analysis):
        if said:
            out.print(said, markup=False)
    out.print(plan_table(made))
    findings = check_plan(made)
    for line in (*made.merged, *finding_lines(findings)):
        out.print(line, markup=False)
    return EXIT_REFUSED if refusals(findings) else EXIT_DONE


def _as_override(argument: str) -> str:
    """`sweeps/clip_x_tis.yaml` as the override that loads it."""
    path = Path(argument)
    if path.suffix in (".yaml", ".yml") and "=" not in argument:
        return f"+sweep={path.stem}"
    return argument


def select(arguments: argparse.Namespace) -> int:
    """Print the table behind each reported step and store it beside the run."""
    out = console()
    for run in run_folders(Path(arguments.folder)):
        chosen = select_run(run, load_config(run))
        files.write_json(run / "selection.json", asdict(chosen))
        out.print(selection_table(str(run), chosen))
        if chosen.reported is None:
            first, interval = 2 * chosen.interval, chosen.interval
            out.print(f"no candidate yet: the first is step {first}, then every {interval} up to {chosen.cap}")
        else:
            out.print(f"reported: {run}/export/step_{chosen.reported.step}", markup=False)
    return EXIT_DONE


def status(arguments: argparse.Namespace) -> int:
    """Print the state of every run of a sweep, from its files alone."""
    for run in run_folders(Path(arguments.folder)):
        current = state(run, load_config(run).train.max_steps)
        print(
            f"{run}  {current.word}  step {current.step}/{current.max_steps}"
            + (f"  {current.error}" if current.error else "")
        )
    return EXIT_DONE


def run_folders(folder: Path) -> list[Path]:
    """The runs below a sweep's folder, or the one run that `folder` is.

    Raises:
        UsageError: it is neither.
    """
    if (folder / "config.yaml").is_file() and (folder / "digest").is_file():
        return [folder]
    document: dict[str, Any] = files.read_json(folder / "plan.json") if (folder / "plan.json").is_file() else {}
    found = [folder / r["folder"] for r in document.get("runs", ())]
    if not found:
        raise UsageError(f"{folder}: neither a sweep (plan.json) nor a run (config.yaml, digest)")
    return [f for f in found if (f / "config.yaml").is_file()]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="ablate", description="Runs are started by: python -m ablate.run --help")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    sub = commands.add_parser("plan", help="what a command or sweep file would run, and what is wrong with it")
    sub.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="as for python -m ablate.run, or a file of sweeps/"
    )
    sub.add_argument("--config-dir", help="a folder with own levels")
    sub.set_defaults(command=plan)
    sub = commands.add_parser("select", help="the table behind each reported step")
    sub.add_argument("folder", help="a sweep's or a run's folder")
    sub.set_defaults(command=select)
    sub = commands.add_parser("status", help="the state of every run")
    sub.add_argument("folder", help="a sweep's or a run's folder")
    sub.set_defaults(command=status)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `ablate` script; returns the exit code."""
    from ablate.launch.errors import one_line

    if clash := name_clash():
        print(f"ablate: {clash}", file=sys.stderr)
    parsed = parser().parse_args(arguments)
    try:
        return int(parsed.command(parsed))
    except BrokenPipeError:
        return EXIT_DONE
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
        print(f"ablate: {line}", file=sys.stderr)
        return EXIT_REFUSED


if __name__ == "__main__":
    sys.exit(main())

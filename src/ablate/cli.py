"""`ablate plan|select|status|report|...`: what the plan and the records say. Starts nothing, imports no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from ablate import files
from ablate.code import name_clash
from ablate.compose import Composer, config_dir
from ablate.config import parse
from ablate.errors import EXIT_DONE, EXIT_REFUSED, UsageError, nearest
from ablate.plan import make_plan
from ablate.report.tables import console, differences, finding_lines, plan_table, selection_table
from ablate.runs import load_config, plan_folder, read_plan, state
from ablate.select import select_run
from ablate.validity import check_plan, read_pilot, refusals


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
        default = parse(source.tree(()))
    out = console()
    for said in (made.sweep.question, made.sweep.analysis):
        if said:
            out.print(said, markup=False)
    out.print(plan_table(made))
    if changed := differences(default, next(iter(made.arms.values())).config, made.factors):
        out.print("differs from the default in: " + "  ".join(changed), markup=False)
    from ablate.validity.cost import estimate, pilot_folder

    pilot = pilot_folder(made)
    out.print(estimate(made, pilot).line(), markup=False)
    findings = check_plan(made, read_pilot(plan_folder(made)))
    if arguments.evaluate:
        from ablate.validity.evaluate import evaluate_plan

        findings += evaluate_plan(made)
    for line in (*made.merged, *finding_lines(findings)):
        out.print(line, markup=False)
    return EXIT_REFUSED if refusals(findings) else EXIT_DONE


def _as_override(argument: str) -> str:
    """`sweeps/clip_x_tis.yaml` as the override that loads it."""
    path = Path(argument)
    if path.suffix not in (".yaml", ".yml") or "=" in argument:
        return argument
    if not path.is_file():
        raise UsageError(f"{path}: not there; a sweep file that comes with ablate is named by +sweep={path.stem}")
    if path.resolve().parent != (config_dir() / "sweep").resolve():
        raise UsageError(f"{path}: put it into FOLDER/sweep/ and type: --config-dir FOLDER +sweep={path.stem}")
    return f"+sweep={path.stem}"


def select(arguments: argparse.Namespace) -> int:
    """Print the table behind each reported step and store it beside the run."""
    out = console()
    for run in (r for folder in arguments.folders for r in run_folders(Path(folder))):
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
    for run in (r for folder in arguments.folders for r in run_folders(Path(folder))):
        current = state(run, load_config(run).train.max_steps)
        print(
            f"{run}  {current.word}  step {current.step}/{current.max_steps}"
            + (f"  {current.error}" if current.error and current.word != "done" else "")
        )
    return EXIT_DONE


def report(arguments: argparse.Namespace) -> int:
    """Write the report of a sweep and print its answer."""
    from ablate.report import document, frames

    formats = arguments.format.split(",")
    if unknown := sorted(set(formats) - set(document.FORMATS)):
        raise UsageError(f"--format {unknown[0]}: {nearest(unknown[0], document.FORMATS)}")
    sweep = frames.load_sweep(Path(arguments.folder))
    made = document.make_report(sweep, arguments.threshold)
    out = console()
    out.print(made.answer, markup=False)
    for path in document.write_report(made, sweep.folder / "report", formats):
        out.print(f"written: {path}", markup=False)
    return EXIT_DONE


def compare(arguments: argparse.Namespace) -> int:
    """Say what else differs between sweeps, then show their arms side by side."""
    from ablate.report import document, frames
    from ablate.validity import check_comparison

    sweeps = [frames.load_sweep(Path(folder)) for folder in arguments.folders]
    out = console()
    for line in finding_lines(check_comparison({str(s.folder): [r.record for r in s.runs] for s in sweeps})):
        out.print(line, markup=False)
    for sweep in sweeps:
        out.print(document.arms_table(document.make_report(sweep)))
    return EXIT_DONE


def power(arguments: argparse.Namespace) -> int:
    """What the finished runs say about the seeds that an effect takes."""
    from ablate.report import document, frames

    sweep = frames.load_sweep(Path(arguments.folder))
    out = console()
    out.print(document.power_summary(sweep, arguments.effect))
    return EXIT_DONE


def sync(arguments: argparse.Namespace) -> int:
    """Rebuild every run for W&B and print the lines that upload them."""
    from ablate.sync import sync as rebuilt

    for line in rebuilt(Path(arguments.folder)):
        print(line)
    return EXIT_DONE


def run_folders(folder: Path) -> list[Path]:
    """The runs below a sweep's folder, or the one run that `folder` is.

    Raises:
        UsageError: it is neither.
    """
    if (folder / "config.yaml").is_file() and (folder / "digest").is_file():
        return [folder]
    if not (folder / "plan.json").is_file():
        raise UsageError(f"{folder}: neither a sweep (plan.json) nor a run (config.yaml, digest)")
    found = [folder / r["folder"] for r in read_plan(folder)["runs"]]
    return [f for f in found if (f / "config.yaml").is_file()]


class _Parser(argparse.ArgumentParser):
    """Mistakes are one line and exit code 1: 2 means that some runs failed."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = _Parser(prog="ablate", description="Runs are started by: python -m ablate.run --help")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    sub = commands.add_parser("plan", help="what a command or sweep file would run, and what is wrong with it")
    sub.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="as for python -m ablate.run, or a file of sweeps/"
    )
    sub.add_argument("--config-dir", help="a folder with own levels")
    sub.add_argument(
        "--evaluate", action="store_true", help="also compare the arms' losses on invented batches (torch)"
    )
    sub.set_defaults(command=plan)
    sub = commands.add_parser("select", help="the table behind each reported step")
    sub.add_argument("folders", nargs="+", metavar="FOLDER", help="a sweep's or a run's folder")
    sub.set_defaults(command=select)
    sub = commands.add_parser("report", help="the question, its answer, effects with intervals, findings, lineage")
    sub.add_argument("folder", help="a sweep's folder")
    sub.add_argument("--format", default="md,csv", help="md, csv or both (the default)")
    sub.add_argument("--threshold", type=float, default=0.8, help="EMA reward that steps-to-threshold waits for")
    sub.set_defaults(command=report)
    sub = commands.add_parser("compare", help="what else differs between sweeps, and their arms side by side")
    sub.add_argument("folders", nargs="+", metavar="FOLDER", help="sweeps' folders, two or more")
    sub.set_defaults(command=compare)
    sub = commands.add_parser("power", help="the seeds that an effect takes, from the spread of finished runs")
    sub.add_argument("folder", help="a sweep's folder")
    sub.add_argument("--effect", type=float, help="the effect to find; the sweep's smallest_effect by default")
    sub.set_defaults(command=power)
    sub = commands.add_parser("sync", help="rebuild the runs for W&B, and the lines that upload them")
    sub.add_argument("folder", help="a sweep's folder")
    sub.set_defaults(command=sync)
    sub = commands.add_parser("status", help="the state of every run")
    sub.add_argument("folders", nargs="+", metavar="FOLDER", help="a sweep's or a run's folder")
    sub.set_defaults(command=status)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `ablate` script; returns the exit code."""
    from ablate.launch.errors import one_line

    if clash := name_clash():
        print(f"ablate: {clash}", file=sys.stderr)
    try:
        parsed = parser().parse_args(arguments)
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

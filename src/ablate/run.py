"""The Hydra application: `python -m ablate.run -m clip=sym,asym tis=on,off`."""

from __future__ import annotations

import os
import sys
from itertools import islice

import hydra
from omegaconf import DictConfig, OmegaConf

from ablate.code import name_clash
from ablate.compose import config_dir
from ablate.errors import EXIT_REFUSED, UsageError
from ablate.helptext import help_text
from ablate.launch.errors import one_line
from ablate.launch.sweeper import SweepEnded


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
def _app(config: DictConfig) -> None:
    # only reached when the user has replaced the mode or the sweeper that conf/config.yaml sets
    raise UsageError("every command goes through ablate's own sweeper; leave hydra.mode and hydra/sweeper as they are")


# flags of Hydra that take a value
_VALUED = {
    *("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp"),
    *("--cfg", "-c", "--package", "-p", "--experimental-rerun"),
}


def flags_first(arguments: list[str]) -> list[str]:
    """Overrides behind all flags: Hydra's parser refuses those that a flag separates from the others.

    >>> flags_first(["-m", "clip=sym", "--config-dir", "own", "seed=1"])
    ['-m', '--config-dir', 'own', 'clip=sym', 'seed=1']
    """
    flags: list[str] = []
    overrides: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument in _VALUED:
            flags += [argument, *islice(rest, 1)]
        else:
            (flags if argument.startswith("-") else overrides).append(argument)
    if {"--cfg", "-c"} & {*flags}:  # Hydra shows the config of one run and refuses -m beside it
        flags = [flag for flag in flags if flag not in ("-m", "--multirun")]
    return flags + overrides


def main() -> None:
    """Run one command line; a user's mistake ends in one line and exit code 1."""
    # Hydra prints and exits by itself unless this is set: with it every error reaches us, and we say it in one line
    full = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    if clash := name_clash():
        print(f"ablate: {clash}", file=sys.stderr)
    OmegaConf.register_new_resolver("ablate_help", help_text, replace=True)
    sys.argv[1:] = flags_first(sys.argv[1:])
    try:
        _app()
    except SweepEnded as ended:
        raise SystemExit(ended.code) from None
    except SystemExit as ended:
        # the argument parser ends with 2, which here means that some runs failed
        raise SystemExit(EXIT_REFUSED if ended.code == 2 else ended.code) from None
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
        print(f"ablate: {line}", file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from None
    finally:
        os.environ.pop("HYDRA_FULL_ERROR") if full is None else os.environ.update(HYDRA_FULL_ERROR=full)


if __name__ == "__main__":
    main()

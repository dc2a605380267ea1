"""The Hydra application: `python -m ablate.run -m clip=sym,asym tis=on,off`."""

from __future__ import annotations

import os
import sys

import hydra
from omegaconf import DictConfig, OmegaConf

from ablate.compose import config_dir
from ablate.helptext import help_text
from ablate.launch.errors import one_line


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
def _app(config: DictConfig) -> None:
    raise AssertionError("the sweeper carries out every command; Hydra never calls the task function")


def main() -> None:
    """Run one command line; a user's mistake ends in one line and exit code 1."""
    # Hydra prints and exits by itself unless this is set: with it every error reaches us, and we say it in one line
    full = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    OmegaConf.register_new_resolver("ablate_help", help_text, replace=True)
    try:
        _app()
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
        print(f"ablate: {line}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        os.environ.pop("HYDRA_FULL_ERROR") if full is None else os.environ.update(HYDRA_FULL_ERROR=full)


if __name__ == "__main__":
    main()

"""`python -m halfstep`, the same as the `halfstep` command, which is in the package halfstep-train."""

import importlib
import sys

from halfstep.errors import explain_missing


def main() -> None:
    """Run the command line, or print what to install for it: hs.Step needs only torch, numpy and safetensors."""
    try:
        command = importlib.import_module("halfstep_train.cli.main")
    except ModuleNotFoundError as error:
        if explained := explain_missing(error, "the halfstep command"):
            sys.exit(f"error: {explained}")
        raise
    command.main()


if __name__ == "__main__":
    main()

"""`python -m halfstep`, the same as the `halfstep` command."""

import sys

from halfstep.errors import explain_missing


def main() -> None:
    """Run the command line, or print what to install for it: hs.Step needs only torch, numpy and safetensors."""
    try:
        from halfstep.cli.main import main as run_command
    except ModuleNotFoundError as error:
        if explained := explain_missing(error, "the halfstep command"):
            sys.exit(f"error: {explained}")
        raise
    run_command()


if __name__ == "__main__":
    main()

"""`python -m halfstep`, the same as the `halfstep` command, which is in the package halfstep-train."""

import sys

from halfstep.errors import InstallError, import_application


def main() -> None:
    """Run the command line, or print what to install for it: hs.Step needs only torch, numpy and safetensors."""
    try:
        command = import_application("cli.main", "the halfstep command")
    except InstallError as error:
        sys.exit(f"error: {error}")
    command.main()


if __name__ == "__main__":
    main()

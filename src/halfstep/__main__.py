"""`python -m halfstep`, the same as the `halfstep` command."""

from halfstep.cli.main import main

if __name__ == "__main__":
    main()

"""`python -m halfstep_check`, the same as the `halfstep-check` command."""

from halfstep_check.cli import main

if __name__ == "__main__":
    main()

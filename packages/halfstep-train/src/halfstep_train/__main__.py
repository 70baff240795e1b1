"""`python -m halfstep_train`, the same as the `halfstep` command."""

from halfstep.__main__ import main

if __name__ == "__main__":
    main()

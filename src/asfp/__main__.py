"""`python -m asfp` is `asfp`."""

from asfp.cli import main

if __name__ == "__main__":
    main()

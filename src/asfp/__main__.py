"""`python -m asfp` is `asfp`."""

from __future__ import annotations

import sys


def main() -> None:
    """`asfp.cli.main`; Ctrl-C while it is still being imported ends it quietly, too."""
    try:
        from asfp.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # Python notes an interrupt that passes through exec of a string, as dataclasses and namedtuples run when they
        # are made, and kills itself at the end though it was caught; the next string resets that
        exec("")


if __name__ == "__main__":
    main()

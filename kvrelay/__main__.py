"""`python -m kvrelay` is the `kvrelay` command."""

from __future__ import annotations

from kvrelay.cli.entry import main

if __name__ == "__main__":
    main()

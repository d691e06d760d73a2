"""Keeps `python -m server.cli` working in a checkout: clients were configured with that name."""

from toprope_server.cli.main import main

if __name__ == "__main__":
    main()

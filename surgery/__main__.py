"""`python -m surgery` (and `accelerate launch -m surgery`) is the command `surgery`."""

from surgery.cli.app import main

if __name__ == "__main__":
    main()
